"""Compiler options without optimisation, for small programs whose compilation takes most of the time of a test."""

import jax

QUICK = {'xla_backend_optimization_level': 0}
"""For `jax.jit(f, compiler_options=QUICK)`, at the top level and on CPUs only.  Results differ in the last bits."""

if jax.__version_info__ < (0, 12):  # later releases have only one way to compile
    QUICK['xla_cpu_use_fusion_emitters'] = False
