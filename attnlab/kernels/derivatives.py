"""Errors for derivatives that a function with a custom gradient does not have; each names the function."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def first_order_only(function: Callable, name: str) -> Callable:
    """Return `function`, the gradient of the function `name`, so that its own derivative raises NotImplementedError.

    Its first argument is static.
    """

    def raise_error(*_: Any) -> Any:
        raise NotImplementedError(f"second derivatives: {name} has none; implementation='dense' has")

    wrapped = jax.custom_vjp(function, nondiff_argnums=(0,))
    wrapped.defvjp(raise_error, raise_error)
    return wrapped


def reverse_mode_only(tree: Any, name: str, remedy: str = "implementation='dense' has") -> Any:
    """Return the arrays of `tree`, so that forward-mode derivatives of them raise NotImplementedError.

    The error has the function's `name` and the `remedy`.  JAX's own error for inputs of a `custom_vjp` function is a
    TypeError that has neither.  Reverse mode works, at no cost.
    """
    return jax.tree.map(partial(_identity, f'jax.jvp: {name} has no forward-mode derivative; {remedy}'), tree)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _identity(error: str, x: Any) -> Any:
    return x


@_identity.defjvp
def _identity_tangent(error: str, primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    return _identity(error, *primals), _tangent.bind(*tangents, error=error)


def _raise_error(*_: Any, error: str) -> Any:
    raise NotImplementedError(error)


# Reverse mode transposes this identity before it is evaluated or compiled; forward mode evaluates or compiles it.
_tangent = Primitive('reverse_only_tangent')
_tangent.def_impl(_raise_error)
_tangent.def_abstract_eval(lambda x, error: x)
mlir.register_lowering(_tangent, _raise_error)
ad.deflinear2(_tangent, lambda cotangent, _, error: [cotangent])
batching.primitive_batchers[_tangent] = lambda args, axes, error: (_tangent.bind(*args, error=error), axes[0])
