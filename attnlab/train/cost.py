"""Cost of a computation from shapes alone: it is traced and never run, so that sizes have no limit.

The arguments are those of a call, with a `jax.ShapeDtypeStruct` (or a tree of them) in place of each array.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core as core

_OPAQUE_PRIMITIVES = (
    'core_map', 'cudnn_fusion', 'dot_product_attention', 'ffi_call', 'mpmd_map', 'pallas_call', 'ragged_dot',
    'scaled_matmul',
)  # fmt: skip
"""Prefixes of the names of primitives that may contain matrix products and do not show them."""

_ADVICE = "if this is attention, use implementation='dense' to count"

_ALREADY_IN_MEMORY = object()
"""Identity of all arrays that take memory whether or not residuals are saved: parameters, inputs and constants."""


def product_flops(f: Callable[..., Any], *shapes: Any) -> int:
    """Return the floating-point operations of all matrix products and convolutions in the trace of `f(*shapes)`.

    A product counts 2 M N K for each element of its batch; a convolution counts 2 x size of the output x size of the
    kernel window x input channels of a group.  Additions and multiplications count one each, in any dtype.  A scan
    counts all of its iterations, a conditional its most expensive branch, a `shard_map` the sum over its devices.
    Operations on zeros (the upper half of a causal mask, the padding or dilation of a convolution) and results that are
    never used count as well.

    Raises:
      ValueError: for products in a loop whose number of iterations depends on values, and for kernels whose products
        cannot be counted.  Attention can have both, but not with implementation='dense'.
    """
    return _jaxpr_flops(jax.make_jaxpr(f)(*shapes).jaxpr)


def gradient_flops(loss: Callable[..., Any], *shapes: Any) -> int:
    """Return the `product_flops` of forward and backward pass: a scalar loss and its gradient by the first argument.

    Products that `jax.checkpoint` computes a second time count twice.
    """
    return product_flops(jax.value_and_grad(loss), *shapes)


def compiler_flops(f: Callable[..., Any], *shapes: Any) -> float:
    """Return XLA's estimate of the floating-point operations of `f(*shapes)` before optimisation; nothing is compiled.

    The estimate contains products, and additions, multiplications and the like, one for each element.  Exponentials and
    other transcendental functions are not included.  The body of a loop, also of a scan, counts once for any number of
    iterations, and a custom kernel counts nothing.  Zeros in the padding of a convolution do not count.

    Raises:
      NotImplementedError: if the backend has no cost analysis.
    """
    analysis = jax.jit(f).lower(*shapes).cost_analysis()
    if analysis is None:
        raise NotImplementedError(f'the backend {jax.default_backend()!r} has no cost analysis')
    parts: Any = analysis if isinstance(analysis, list) else [analysis]
    return float(sum(part.get('flops', 0.0) for part in parts))  # XLA leaves out a count of zero


def saved_bytes(f: Callable[..., Any], params: Any, *shapes: Any) -> int:
    """Return the bytes that `f(params, *shapes)` saves for the backward pass of a gradient by `params`.

    These are the residuals of `jax.vjp`, each array once: activations, masks, random bits and scalars that `f`
    computes, and arrays that a scan stacks over its iterations.  An output of `f` counts if the gradient needs it.
    Parameters, inputs and constants, such as an array full of zeros, do not count.  A reshaped array is the same array.
    A cast or transposed array is a new one and counts, even if it is a parameter; so does every array that a scan
    stacks, even if it is a reshaped parameter.  XLA may save less, if one array is cheap to compute from another.
    """

    def residuals(params: Any, *args: Any) -> list[Any]:
        return jax.tree.leaves(jax.vjp(lambda params: f(params, *args), params)[1])

    jaxpr = jax.make_jaxpr(residuals)(params, *shapes).jaxpr
    identities = _output_identities(jaxpr, [_ALREADY_IN_MEMORY] * len(jaxpr.invars))
    saved = dict(zip(identities, jaxpr.outvars, strict=True))
    return sum(tree_bytes(x.aval) for identity, x in saved.items() if identity is not _ALREADY_IN_MEMORY)


def tree_size(tree: Any) -> int:
    """Return the number of elements of all arrays or shapes of a tree."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def tree_bytes(tree: Any) -> int:
    """Return the bytes of all arrays or shapes of a tree."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def device_bytes(tree: Any) -> int:
    """Return the bytes on one device of a tree of arrays or shapes with shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def format_bytes(count: float) -> str:
    """Return a number of bytes as text, such as '1.5 GiB'."""
    prefixes = ['', 'Ki', 'Mi', 'Gi', 'Ti']
    while abs(count) >= 1024 and len(prefixes) > 1:
        count, prefixes = count / 1024, prefixes[1:]
    return f'{count:,.{1 if prefixes[0] else 0}f} {prefixes[0]}B'


def _jaxpr_flops(jaxpr: core.Jaxpr) -> int:
    return sum(map(_equation_flops, jaxpr.eqns))


def _equation_flops(eqn: Any) -> int:
    name, inner_flops = eqn.primitive.name, [_jaxpr_flops(jaxpr) for jaxpr in _inner_jaxprs(eqn)]
    match name:
        case 'dot_general':
            (contracted_axes, _), _ = eqn.params['dimension_numbers']
            left_shape = eqn.invars[0].aval.shape
            return 2 * tree_size(eqn.outvars[0].aval) * math.prod(left_shape[axis] for axis in contracted_axes)
        case 'conv_general_dilated':
            # The kernel has the input channels of one group only.
            _, channel_axis, *window_axes = eqn.params['dimension_numbers'].rhs_spec
            kernel_shape = eqn.invars[1].aval.shape
            multiplications = math.prod(kernel_shape[axis] for axis in (channel_axis, *window_axes))
            return 2 * tree_size(eqn.outvars[0].aval) * multiplications
        case 'cond':
            return max(inner_flops)
        case 'scan':
            return eqn.params['length'] * sum(inner_flops)
        case 'shard_map':
            axes = eqn.params.get('newly_manual_axes') or eqn.params['manual_axes']  # the latter in jax 0.10.1
            return math.prod(eqn.params['mesh'].shape[axis] for axis in axes) * sum(inner_flops)
        case 'while' if sum(inner_flops):
            raise ValueError(
                f'a while loop contains matrix products, and its number of iterations depends on values; {_ADVICE}'
            )
        case _ if name.startswith(_OPAQUE_PRIMITIVES):
            raise ValueError(f'the matrix products inside {name} cannot be counted; {_ADVICE}')
    return sum(inner_flops)


def _inner_jaxprs(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """Yield the jaxprs in the parameters of an equation."""
    for value in eqn.params.values():
        for part in value if isinstance(value, tuple | list) else [value]:
            if isinstance(part, core.ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, core.Jaxpr):
                yield part


def _output_identities(jaxpr: core.Jaxpr, input_identities: list[object]) -> list[object]:
    """Return an object for each output of a jaxpr that stands for its array: outputs that are one array share it.

    An output that is an input passed through has the object of that input.
    """
    identities = dict(zip(jaxpr.invars, input_identities, strict=True))

    def identity(x: Any) -> object:
        # Literals, and variables that no equation defines, are constants.
        return _ALREADY_IN_MEMORY if isinstance(x, core.Literal) else identities.get(x, _ALREADY_IN_MEMORY)

    for eqn in jaxpr.eqns:
        inputs = [identity(x) for x in eqn.invars]
        if eqn.primitive.name in ('jit', 'closed_call', 'custom_jvp_call', 'custom_vjp_call', 'remat2'):
            outputs = _output_identities(next(_inner_jaxprs(eqn)), inputs)
        else:
            # New objects, not the variables: two calls of one function share its jaxpr, and so its variables.
            outputs = inputs if _needs_no_memory(eqn) else [object() for _ in eqn.outvars]
        identities.update(zip(eqn.outvars, outputs, strict=True))
    return [identity(x) for x in jaxpr.outvars]


def _needs_no_memory(eqn: core.JaxprEqn) -> bool:
    """Return whether the outputs are the inputs in memory, or a constant that is the same everywhere."""
    match eqn.primitive.name:
        case 'copy' | 'name' | 'optimization_barrier' | 'squeeze':
            return True
        case 'reshape':
            return eqn.params['dimensions'] is None
        case 'broadcast_in_dim':  # also used to add axes of size 1
            (x, *_), (output,) = eqn.invars, eqn.outvars
            return isinstance(x, core.Literal) or tree_size(x.aval) == tree_size(output.aval)
    return False
