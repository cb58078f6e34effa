"""Memory of the gradient grows linearly with the length in `blockwise`, and quadratically in `dense`.

Two measurements, neither of which runs a program: the largest value in the traced program, and the temporaries that the
compiled program allocates.
"""

import jax
import jax.numpy as jnp
import pytest

from attnlab import dot_product_attention
from tests.kernels.programs import OPTIONS, N, abstract_values

LENGTHS = (1024, 2048, 4096, 8192, 16384)
H = 16
GROWTH = 2.3  # the largest factor when the length doubles


def gradient_and_arguments(implementation, T, options):
    """Return the gradient function of a weighted sum, in all floating-point arrays, and the shapes of its arguments."""
    traced = {name: x for name, x in options.items() if isinstance(x, jax.ShapeDtypeStruct)}
    static = {name: x for name, x in options.items() if name not in traced}
    floats = {name: jax.ShapeDtypeStruct((1, T, N, H), 'float32') for name in ('query', 'key', 'value')}
    floats |= {name: x for name, x in traced.items() if x.dtype == jnp.float32}
    others = {name: x for name, x in traced.items() if name not in floats}

    def loss(floats, others, weight):
        results = dot_product_attention(**floats, **others, **static, implementation=implementation)
        return jnp.vdot(results[0] if isinstance(results, tuple) else results, weight)

    return jax.value_and_grad(loss), (floats, others, floats['query'])


def largest_value(function, args) -> int:
    """Return the number of elements of the largest value in the traced program."""
    return max(value.size for value in abstract_values(jax.make_jaxpr(function)(*args).jaxpr) if hasattr(value, 'size'))


def temporaries(function, args) -> int:
    """Return the bytes that the compiled program allocates besides its arguments and results."""
    return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes


def growth_factors(measure, implementation, name, lengths=LENGTHS) -> list[float]:
    sizes = [measure(*gradient_and_arguments(implementation, T, OPTIONS[name](T))) for T in lengths]
    return [after / before for before, after in zip(sizes, sizes[1:], strict=False)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('name', OPTIONS)
def test_no_value_grows_quadratically_with_length(name):
    assert max(growth_factors(largest_value, 'blockwise', name)) <= GROWTH
    assert min(growth_factors(largest_value, 'dense', name)) > 3.9


@pytest.mark.slow
@pytest.mark.parametrize('name', [pytest.param('plain', marks=pytest.mark.slow), 'causal'])
def test_compiled_gradient_takes_memory_linear_in_length(name):
    assert max(growth_factors(temporaries, 'blockwise', name)) <= GROWTH
    assert min(growth_factors(temporaries, 'dense', name, LENGTHS[:3])) > 3.5


def test_largest_value_is_found_in_nested_programs():
    def hidden(x):
        big = lambda x: jnp.sum(jnp.zeros((7, 11, 13)) + x)
        inside = lambda x: jax.lax.cond(x > 0, big, lambda x: x, x)
        return jax.lax.scan(lambda x, _: (jax.lax.while_loop(lambda x: x < 0, inside, x), None), x, length=2)[0]

    assert largest_value(jax.jit(hidden), (jnp.float32(1.0),)) == 7 * 11 * 13
