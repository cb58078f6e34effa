"""Memory of the gradient grows with the length in `blockwise`, where the whole matrix makes it grow with its square.

Two readings, neither of which runs anything: the largest value anywhere in the program as JAX traces it, and the
temporaries that the compiled program asks for.
"""

import jax
import jax.numpy as jnp
import pytest

from attnlab import dot_product_attention
from tests.kernels.programs import OPTIONS, N, abstract_values

LENGTHS = (1024, 2048, 4096, 8192, 16384)
H = 16
GROWTH = 2.3  # by a doubling of the length


def gradient(implementation, T, options):
    """The gradient of a weighted sum in all that has one, and its arguments as shapes."""
    moving = {name: x for name, x in options.items() if isinstance(x, jax.ShapeDtypeStruct)}
    fixed = {name: x for name, x in options.items() if name not in moving}
    floats = {name: jax.ShapeDtypeStruct((1, T, N, H), 'float32') for name in ('query', 'key', 'value')}
    floats |= {name: x for name, x in moving.items() if x.dtype == jnp.float32}
    others = {name: x for name, x in moving.items() if name not in floats}

    def loss(floats, others, weight):
        made = dot_product_attention(**floats, **others, **fixed, implementation=implementation)
        return jnp.vdot(made[0] if isinstance(made, tuple) else made, weight)

    return jax.value_and_grad(loss), (floats, others, floats['query'])


def largest(function, args) -> int:
    """Elements of the largest value."""
    return max(value.size for value in abstract_values(jax.make_jaxpr(function)(*args).jaxpr) if hasattr(value, 'size'))


def temporaries(function, args) -> int:
    """Bytes that the compiled program allocates besides its arguments and results."""
    return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes


def ratios(measure, implementation, name, lengths=LENGTHS) -> list[float]:
    sizes = [measure(*gradient(implementation, T, OPTIONS[name](T))) for T in lengths]
    return [after / before for before, after in zip(sizes, sizes[1:], strict=False)]


@pytest.mark.parametrize('name', OPTIONS)
def test_no_value_grows_with_the_square_of_the_length(name):
    assert max(ratios(largest, 'blockwise', name)) <= GROWTH
    assert min(ratios(largest, 'dense', name)) > 3.9


@pytest.mark.parametrize('name', [pytest.param('plain', marks=pytest.mark.slow), 'causal'])
def test_the_compiled_gradient_takes_memory_linear_in_the_length(name):
    assert max(ratios(temporaries, 'blockwise', name)) <= GROWTH
    assert min(ratios(temporaries, 'dense', name, LENGTHS[:3])) > 3.5


def test_the_walk_goes_into_programs_inside_programs():
    def hidden(x):
        big = lambda x: jnp.sum(jnp.zeros((7, 11, 13)) + x)
        inside = lambda x: jax.lax.cond(x > 0, big, lambda x: x, x)
        return jax.lax.scan(lambda x, _: (jax.lax.while_loop(lambda x: x < 0, inside, x), None), x, length=2)[0]

    assert largest(jax.jit(hidden), (jnp.float32(1.0),)) == 7 * 11 * 13
