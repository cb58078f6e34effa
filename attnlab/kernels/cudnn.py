"""Attention by cuDNN's kernel for NVIDIA GPUs, called as `jax.nn.dot_product_attention` calls it.

Outside of what is refused by name the contract holds, but that
- weights are rounded to the dtype of `query` before they meet the values, as in every kernel for tensor cores;
- a logit that a mask array or a bias of -inf hides counts as 2^41 less, not as infinitely less;
- a row that sees something not finite is NaN, and sends no gradient where `dense` sends NaN;
- under `jax.vmap`, JAX takes a bias or mask only in its full size [B, N, T, S], and raises a TypeError otherwise.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.kernels import dense, sanitize
from attnlab.kernels.call import AttentionCall, AttentionOutput, raise_unsupported
from attnlab.kernels.masks import Mask, mask_as_array

HIDDEN_LOGIT = -(2.0**41)
"""Hides a key, as in JAX.  Of -inf cuDNN may make NaN where a row has nothing else, and zero times NaN is NaN."""


def dot_product(call: AttentionCall) -> AttentionOutput:
    """As `dense.dot_product`; beside a mask or bias of full size memory is O(T + S).

    Raises NotImplementedError on other machines, and for what cuDNN lacks or does wrong; the reasons are in `_refuse`.
    """
    _refuse(call, compute_capability())
    if 0 in call.query.shape or 0 in call.value.shape:
        return dense.dot_product(call)
    call, bias = _with_bias(call)
    return sanitize.run_sanitized(lambda call: _call(call, bias), call)


def pays(call: AttentionCall, platform: str) -> bool:
    """Always: it is the fastest where it serves."""
    return True


def compute_capability() -> tuple[int, int]:
    """The compute capability of this process's NVIDIA GPU.  Raises NotImplementedError where it has none."""
    device = jax.local_devices()[0]
    if device.platform != 'gpu' or 'cuda' not in device.client.platform_version:
        raise NotImplementedError(f'platform: cudnn needs an NVIDIA GPU; this process runs on {device.platform}')
    major, minor = device.compute_capability.split('.')
    return int(major), int(minor)


def _refuse(call: AttentionCall, capability: tuple[int, int]) -> None:
    T, S = call.query.shape[1], call.key.shape[1]
    half, width = call.query.dtype, max(call.query.shape[-1], call.value.shape[-1])
    limit = 256 if capability[0] == 9 else 128
    nowhere = 'JAX has no way to tell cuDNN'
    raise_unsupported([
        ('platform', capability < (8, 0), f'cuDNN wants compute capability 8.0; this GPU has {capability}'),
        ('query', half not in (jnp.bfloat16, jnp.float16), f'cuDNN takes bfloat16 and float16, not {half}'),
        ('query', width > limit, f'cuDNN has a gradient for heads of {limit} numbers here, not of {width}'),
        # In its gradient there may be NaN (cudnn-frontend#1072).
        ('query', T == 1, 'for one row cuDNN is not reliable, and nothing is gained'),
        ('key', call.key.dtype != half, f'its dtype {call.key.dtype} is not that of query, {half}'),
        ('value', call.value.dtype != half, f'its dtype {call.value.dtype} is not that of query, {half}'),
        ('scale', isinstance(call.scale, jax.Array), 'cuDNN takes a number, not an array'),
        ('logits_soft_cap', call.logits_soft_cap is not None, nowhere),
        ('sinks', call.sinks is not None, nowhere),
        ('alibi_slopes', call.alibi_slopes is not None, nowhere),
        ('dropout_rate', call.dropout_rate > 0.0, 'cuDNN draws other weights than the implementations here'),
        ('block_sizes', call.block_sizes is not None, 'cuDNN chooses its own'),
        ('return_weights', call.return_weights, 'cuDNN never forms them'),
        ('return_residual', call.return_residual, f'JAX rounds it to {half}'),
        *_refused_mask(call.mask, call.bias is not None or call.mask.mask is not None, T, S),
        *_refused_pairs(call, T, S),
    ])  # fmt: skip


def _refused_mask(mask: Mask, in_bias: bool, T: int, S: int) -> list[tuple[str, bool, str]]:
    left, right = sanitize.effective_window(mask)
    counts = mask.is_causal or mask.window is not None
    return [
        ('prefix_lengths', mask.prefix_lengths is not None, 'cuDNN has no prefix'),
        ('query_segment_ids', mask.query_segment_ids is not None, 'JAX has no way to tell cuDNN'),
        ('query_positions', counts and mask.query_positions is not None, 'cuDNN counts rows'),
        ('key_positions', counts and mask.key_positions is not None, 'cuDNN counts columns'),
        # A bias can hold any window; without one cuDNN has those that end at the diagonal.
        ('local_window_size', not in_bias and right > 0 and (left < T - 1 or right < S - 1),
         f'cuDNN has windows to the left that end at the query, not {mask.window}'),
    ]  # fmt: skip


def _refused_pairs(call: AttentionCall, T: int, S: int) -> list[tuple[str, bool, str]]:
    given = {name: x for name, x in (('mask', call.mask.mask), ('bias', call.bias)) if x is not None}
    if not given:
        return []
    shapes = [x.shape for x in given.values()]
    whole = (*np.broadcast_shapes(*shapes)[:2], T, S)
    name, half = next(iter(given)), call.query.dtype
    dtype = given['bias'].dtype if 'bias' in given else half
    return [
        ('bias', dtype != half, f'its dtype {dtype} is not that of query, {half}'),
        (name, half == jnp.float16, 'cuDNN adds it in float16, where no number is low enough to hide a key'),
        (name, whole not in shapes, f'cuDNN wants it spread out from {" and ".join(map(str, shapes))} to {whole}'),
        (name, bool(T % 2 or S % 2), f'beside it cuDNN wants even lengths, not {T} and {S}'),
    ]


def _with_bias(call: AttentionCall) -> tuple[AttentionCall, Array | None]:
    """The call with all that hides pairs one by one in its mask, and that mask and the bias as one bias."""
    (T, S), mask, bias = (call.query.shape[1], call.key.shape[1]), call.mask.mask, call.bias
    if bias is not None:  # one of -inf hides a pair like a mask
        shown = bias > -jnp.inf
        mask = (shown | jnp.isnan(bias)) if mask is None else mask & (shown | jnp.isnan(bias))
    if mask is None:
        return call, None
    call = call._replace(mask=call.mask.replace(mask=mask))
    allowed = mask_as_array(call.mask, T, S)
    assert allowed is not None
    # An array for several batch rows or heads holds what any of them sees.
    shared = [axis for axis in range(4) if mask.shape[axis] == 1 < allowed.shape[axis]]
    seen = jnp.any(allowed, axis=shared, keepdims=True)
    nothing = jnp.zeros((), call.query.dtype)
    return call, jnp.where(seen, nothing if bias is None else bias, jnp.asarray(HIDDEN_LOGIT, call.query.dtype))


def _call(call: AttentionCall, bias: Array | None) -> Array:
    """cuDNN's own output [B, T, N, Hv]; rows that see nothing hold anything."""
    B, T, _, H = call.query.shape
    S, Hv = call.key.shape[1], call.value.shape[-1]
    width = -(-max(H, Hv) // 8) * 8
    query, key, value = (
        jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, width - x.shape[-1]))) for x in (call.query, call.key, call.value)
    )
    left, right = sanitize.effective_window(call.mask)
    # A window to the left needs is_causal: on its own cuDNN lets it see the whole future (jax#39576).
    is_windowed = bias is None and right == 0 and left < T - 1
    lengths = _lengths(call, B, T, S, left if is_windowed else None)
    query, key, value, bias, *lengths = _mapped_together(query, key, value, bias, *lengths)
    output = jax.nn.dot_product_attention(
        query, key, value, bias, scale=float(call.scale), is_causal=right == 0, implementation='cudnn',
        local_window_size=(left, 0) if is_windowed else None,
        query_seq_lengths=lengths[0], key_value_seq_lengths=lengths[1],
    )  # fmt: skip
    return output[..., :Hv]


def _lengths(call: AttentionCall, B: int, T: int, S: int, left: int | None) -> tuple[Array, Array] | tuple[None, None]:
    """Lengths under which every row sees some key: those that a window leaves with none come last, and are cut off."""
    queries, keys = call.mask.query_seq_lengths, call.mask.key_value_seq_lengths
    # Without lengths cuDNN leaves the end of a block of keys to chance (pytorch#196678), and has no window for T > S.
    if queries is None and keys is None and S % 128 == 0 and (left is None or T <= S):
        return None, None
    keys = jnp.full(B, S) if keys is None else jnp.maximum(sanitize.clip_lengths(keys, S), 1)
    queries = jnp.full(B, T) if queries is None else sanitize.clip_lengths(queries, T)
    if left is not None:
        queries = jnp.minimum(queries, keys + left)
    return jnp.maximum(queries, 1).astype(jnp.int32), keys.astype(jnp.int32)


def _mapped_together(*arrays: Array | None) -> list[Any]:
    """The same values, each of them mapped by `jax.vmap` if any is, as JAX's rule for cuDNN takes for granted.

    Else it fails, and a bias that all calls share gets the sum of their gradients from each.
    The compiler sees that nothing is done here.
    """
    never = jnp.zeros((), bool)
    for x in arrays:
        never = never if x is None else never | (x[(0,) * x.ndim] != 0)
    never &= False
    return [None if x is None else jnp.where(never, jnp.zeros_like(x), x) for x in arrays]
