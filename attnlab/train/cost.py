"""What a computation costs, from shapes alone: it is traced and never run, so that no size is too large.

Functions are given as they would be called, with `jax.ShapeDtypeStruct` (or trees of them) wherever an array would be.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core as core

_UNSEEN = (
    'core_map', 'cudnn_fusion', 'dot_product_attention', 'ffi_call', 'mpmd_map', 'pallas_call', 'ragged_dot',
    'scaled_matmul',
)  # fmt: skip
"""What primitives are called that may multiply and do not show how much."""

_ADVICE = "where this is attention, count with implementation='dense'"

_GIVEN = object()  # stands for every array that is there whether or not anything is kept


def product_flops(f: Callable[..., Any], *shapes: Any) -> int:
    """Floating-point operations of all matrix products and convolutions that `f(*shapes)` traces to.

    A product counts 2 M N K for each member of its batch, a convolution 2 x size of the output x taps x channels of a
    group; additions and multiplications one each, in any dtype.  Scans count all their turns, a branch its dearest
    side, a `shard_map` the sum over its devices.  Counted as well is what meets zeros only, such as a causal mask's
    upper half, or the padding and the dilated input of a convolution, and what is computed and never used.

    Raises:
      ValueError: for products in a loop whose turns depend on values, and for kernels that do not show what they do.
        Attention may have both, but not with implementation='dense'.
    """
    return _flops(jax.make_jaxpr(f)(*shapes).jaxpr)


def gradient_flops(loss: Callable[..., Any], *shapes: Any) -> int:
    """`product_flops` of the loss, a scalar, and its gradient by the first argument: forward and backward together.

    What `jax.checkpoint` computes a second time counts twice.
    """
    return product_flops(jax.value_and_grad(loss), *shapes)


def compiler_flops(f: Callable[..., Any], *shapes: Any) -> float:
    """Floating-point operations as XLA estimates them for `f(*shapes)` before it optimises; nothing is compiled.

    Beside products these are additions, multiplications and the like, one for each element; exponentials and other
    transcendental functions are not among them.  A loop's body counts once however many turns it takes, scans
    included, and a kernel that XLA does not know counts nothing.  Zeros of a convolution's padding do not count.

    Raises:
      NotImplementedError: where the backend estimates nothing.
    """
    found = jax.jit(f).lower(*shapes).cost_analysis()
    if found is None:
        raise NotImplementedError(f'the backend {jax.default_backend()!r} has no cost analysis')
    parts: Any = found if isinstance(found, list) else [found]
    return float(sum(part.get('flops', 0.0) for part in parts))  # a count of zero is left out


def saved_bytes(f: Callable[..., Any], params: Any, *shapes: Any) -> int:
    """Bytes of what `f(params, *shapes)` keeps until the backward pass of a gradient by `params`.

    These are the residuals of `jax.vjp`, each array once: activations, masks, random bits and scalars that `f` makes,
    and what a scan stacks up over its turns.  An output of `f` is among them if the gradient needs it.  Parameters,
    inputs and constants, such as an array full of zeros, are not.  A reshaped array is the same array, but what is
    cast or transposed is a new one and counts, be it a parameter; and so does all that a scan stacks, be it a reshaped
    parameter.  XLA may keep less, where one array is cheap to make again from another.
    """

    def residuals(params: Any, *args: Any) -> list[Any]:
        return jax.tree.leaves(jax.vjp(lambda params: f(params, *args), params)[1])

    jaxpr = jax.make_jaxpr(residuals)(params, *shapes).jaxpr
    kept = dict(zip(_origins(jaxpr, [_GIVEN] * len(jaxpr.invars)), jaxpr.outvars, strict=True))
    return sum(tree_bytes(x.aval) for origin, x in kept.items() if origin is not _GIVEN)


def tree_size(tree: Any) -> int:
    """Elements of all arrays or shapes of a tree."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays or shapes of a tree."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def device_bytes(tree: Any) -> int:
    """Bytes on one device of a tree of arrays or shapes with shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def format_bytes(count: float) -> str:
    """A number of bytes as text, such as '1.5 GiB'."""
    prefixes = ['', 'Ki', 'Mi', 'Gi', 'Ti']
    while abs(count) >= 1024 and len(prefixes) > 1:
        count, prefixes = count / 1024, prefixes[1:]
    return f'{count:,.{1 if prefixes[0] else 0}f} {prefixes[0]}B'


def _flops(jaxpr: core.Jaxpr) -> int:
    return sum(map(_equation_flops, jaxpr.eqns))


def _equation_flops(eqn: Any) -> int:
    name, inner = eqn.primitive.name, [_flops(jaxpr) for jaxpr in _inner(eqn)]
    match name:
        case 'dot_general':
            (contracted, _), _ = eqn.params['dimension_numbers']
            left = eqn.invars[0].aval.shape
            return 2 * tree_size(eqn.outvars[0].aval) * math.prod(left[axis] for axis in contracted)
        case 'conv_general_dilated':
            _, channels, *taps = eqn.params['dimension_numbers'].rhs_spec  # the kernel's channels are one group's
            kernel = eqn.invars[1].aval.shape
            return 2 * tree_size(eqn.outvars[0].aval) * math.prod(kernel[axis] for axis in (channels, *taps))
        case 'cond':
            return max(inner)
        case 'scan':
            return eqn.params['length'] * sum(inner)
        case 'shard_map':
            axes = eqn.params.get('newly_manual_axes') or eqn.params['manual_axes']  # the name in jax 0.10.1
            return math.prod(eqn.params['mesh'].shape[axis] for axis in axes) * sum(inner)
        case 'while' if sum(inner):
            raise ValueError(f'a while loop turns as often as values say, and has products in it; {_ADVICE}')
        case _ if name.startswith(_UNSEEN):
            raise ValueError(f'{name} does not show its products; {_ADVICE}')
    return sum(inner)


def _inner(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """The jaxprs that an equation holds."""
    for value in eqn.params.values():
        for part in value if isinstance(value, tuple | list) else [value]:
            if isinstance(part, core.ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, core.Jaxpr):
                yield part


def _origins(jaxpr: core.Jaxpr, given: list[object]) -> list[object]:
    """A token for each output, the same for what is one array; that of an input where it is passed on."""
    origins = dict(zip(jaxpr.invars, given, strict=True))
    of = lambda x: _GIVEN if isinstance(x, core.Literal) else origins.get(x, _GIVEN)  # else a constant
    for eqn in jaxpr.eqns:
        given = [of(x) for x in eqn.invars]
        if eqn.primitive.name in ('jit', 'closed_call', 'custom_jvp_call', 'custom_vjp_call', 'remat2'):
            made = _origins(next(_inner(eqn)), given)
        else:
            # Not the variables: two calls of one function share its jaxpr, and with it theirs.
            made = given if _passes_on(eqn) else [object() for _ in eqn.outvars]
        origins.update(zip(eqn.outvars, made, strict=True))
    return [of(x) for x in jaxpr.outvars]


def _passes_on(eqn: core.JaxprEqn) -> bool:
    """Whether its outputs are its inputs in memory, or one number everywhere."""
    match eqn.primitive.name:
        case 'copy' | 'name' | 'optimization_barrier' | 'squeeze':
            return True
        case 'reshape':
            return eqn.params['dimensions'] is None
        case 'broadcast_in_dim':  # what only gets more axes
            (x, *_), (output,) = eqn.invars, eqn.outvars
            return isinstance(x, core.Literal) or tree_size(x.aval) == tree_size(output.aval)
    return False
