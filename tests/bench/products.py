"""The matrix products of a program."""

from math import prod

import jax


def multiplied(equation):
    """The products of an equation and of the programs inside it."""
    if equation.primitive.name == 'dot_general':
        left, right = (x.aval.shape for x in equation.invars)
        (inner, _), (batch, _) = equation.params['dimension_numbers']
        shared, K = (prod(left[axis] for axis in axes) for axes in (batch, inner))
        yield shared, K, *sorted(prod(x) // (shared * K) for x in (left, right))
    for inside in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'eqns')):
        for each in getattr(inside, 'eqns', ()):
            yield from multiplied(each)
