"""Options of attention calls, and the values inside of a traced program."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

N = 2  # heads


def integer_row(T):
    """Return the shape of one integer for each token."""
    return jax.ShapeDtypeStruct((1, T), 'int32')


OPTIONS = {
    'plain': lambda T: {},
    'causal': lambda T: {'is_causal': True},
    'window': lambda T: {'local_window_size': (128, 0)},
    'lengths': lambda T: {'query_seq_lengths': jnp.array([T - 5]), 'key_value_seq_lengths': jnp.array([T - 9])},
    'segments': lambda T: {'query_segment_ids': integer_row(T), 'key_segment_ids': integer_row(T)},
    'positions': lambda T: {
        'is_causal': True, 'query_positions': integer_row(T), 'key_positions': integer_row(T),
    },
    'alibi': lambda T: {'alibi_slopes': jax.ShapeDtypeStruct((N,), 'float32')},
    'sinks': lambda T: {'sinks': jax.ShapeDtypeStruct((N,), 'float32')},
    'cap': lambda T: {'logits_soft_cap': 30.0},
    'norm': lambda T: {'qk_norm': 'rms'},
    'dropout': lambda T: {'dropout_rate': 0.1, 'dropout_rng': jax.random.key(0)},
    'residual': lambda T: {'return_residual': True},
}  # fmt: skip
"""Functions from T to the keyword arguments of a call of T queries and keys, by name; some arrays are only shapes."""


def inner_jaxprs(equation) -> Iterator[Jaxpr]:
    """Yield the programs among the parameters of an equation."""
    for leaf in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: isinstance(x, ClosedJaxpr)):
        if isinstance(leaf, ClosedJaxpr | Jaxpr):
            yield leaf.jaxpr if isinstance(leaf, ClosedJaxpr) else leaf


def abstract_values(jaxpr: Jaxpr) -> Iterator[jax.core.AbstractValue]:
    """Yield the abstract value of every variable of a program and of all programs inside it."""
    yield from (variable.aval for variable in (*jaxpr.constvars, *jaxpr.invars))
    for equation in jaxpr.eqns:
        yield from (variable.aval for variable in equation.outvars)
        for inner in inner_jaxprs(equation):
            yield from abstract_values(inner)
