"""Derivatives that a function with its own gradient refuses, each by an error that names the function."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def first_order_only(function: Callable, name: str) -> Callable:
    """A gradient, its first argument fixed, that says by name that it has none of its own."""

    def refuse(*_: Any) -> Any:
        raise NotImplementedError(f"second derivatives: {name} has none; implementation='dense' has")

    first = jax.custom_vjp(function, nondiff_argnums=(0,))
    first.defvjp(refuse, refuse)
    return first


def reverse_mode_only(tree: Any, name: str, remedy: str = "implementation='dense' has") -> Any:
    """The arrays of `tree`, whose forward-mode derivatives raise NotImplementedError with `name` and `remedy`.

    JAX's own error for inputs of a `custom_vjp` function is a TypeError that names neither function nor remedy.
    Reverse mode passes, and costs nothing.
    """
    return jax.tree.map(partial(_identity, f'jax.jvp: {name} has no forward-mode derivative; {remedy}'), tree)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _identity(error: str, x: Any) -> Any:
    return x


@_identity.defjvp
def _identity_tangent(error: str, primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    return _identity(error, *primals), _tangent.bind(*tangents, error=error)


def _refuse(*_: Any, error: str) -> Any:
    raise NotImplementedError(error)


# Reverse mode transposes this identity before it is evaluated or compiled; forward mode does not.
_tangent = Primitive('reverse_only_tangent')
_tangent.def_impl(_refuse)
_tangent.def_abstract_eval(lambda x, error: x)
mlir.register_lowering(_tangent, _refuse)
ad.deflinear2(_tangent, lambda cotangent, _, error: [cotangent])
batching.primitive_batchers[_tangent] = lambda args, axes, error: (_tangent.bind(*args, error=error), axes[0])
