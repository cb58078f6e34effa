"""Compiling with the optimiser off, for programs so small that making them takes nearly all of a test's time."""

QUICK = {'xla_backend_optimization_level': 0, 'xla_cpu_use_fusion_emitters': False}
"""`jax.jit(f, compiler_options=QUICK)`, at the top level and on a CPU only.  Bits differ from those of the full way."""
