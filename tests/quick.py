"""Compiling with the optimiser off, for programs so small that making them takes nearly all of a test's time."""

import jax

QUICK = {'xla_backend_optimization_level': 0}
"""`jax.jit(f, compiler_options=QUICK)`, at the top level and on a CPU only.  Bits differ from those of the full way."""

if jax.__version_info__ < (0, 12):  # later ones have no other way to compile
    QUICK['xla_cpu_use_fusion_emitters'] = False
