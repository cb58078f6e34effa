"""The matrix products of a traced program."""

from math import prod

import jax


def matrix_products(equation):
    """Yield the matrix products of a jaxpr equation and of the jaxprs inside it.

    Each product is (batch size, inner size, smaller outer size, larger outer size).
    """
    if equation.primitive.name == 'dot_general':
        left, right = (x.aval.shape for x in equation.invars)
        (inner_axes, _), (batch_axes, _) = equation.params['dimension_numbers']
        batch, inner = (prod(left[axis] for axis in axes) for axes in (batch_axes, inner_axes))
        yield batch, inner, *sorted(prod(shape) // (batch * inner) for shape in (left, right))
    for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'eqns')):
        for inner_equation in getattr(parameter, 'eqns', ()):
            yield from matrix_products(inner_equation)
