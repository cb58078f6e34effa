"""Attention by cuDNN's kernel for NVIDIA GPUs, through `jax.nn.dot_product_attention(implementation='cudnn')`.

The contract of `attnlab.dot_product_attention` holds for every supported call, with these exceptions:

- Weights are rounded to the dtype of `query` before the product with the values, as in every tensor-core kernel.
- Masked logits (mask array, or bias of -inf) get -2^41 added; they are not set to -inf.
- If a key or value that a row may attend to is inf or NaN, the output of the row is NaN and its gradient is zero;
  `dense` gives a gradient of NaN.
- Under `jax.vmap`, JAX supports a bias or mask only in its full size [B, N, T, S], and raises TypeError otherwise.
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
"""The bias that hides a key, as in JAX.  With -inf, cuDNN may return NaN for a row that has no other keys, and zero
times NaN is NaN."""


def dot_product(call: AttentionCall) -> AttentionOutput:
    """Return the same as `dense.dot_product`, with memory O(T + S) besides a mask or bias of full size.

    Raises NotImplementedError on other machines, and for what cuDNN does not support or does wrong (see
    `_check_supported`).
    """
    _check_supported(call, compute_capability())
    if 0 in call.query.shape or 0 in call.value.shape:
        return dense.dot_product(call)
    call, bias = _merge_mask_into_bias(call)
    return sanitize.run_sanitized(lambda call: _call_cudnn(call, bias), call)


def is_preferred(call: AttentionCall, platform: str) -> bool:
    """Return True: cuDNN is the fastest implementation of every call that it supports."""
    return True


def compute_capability() -> tuple[int, int]:
    """Return (major, minor) of this process's NVIDIA GPU.  Raises NotImplementedError if it has none."""
    device = jax.local_devices()[0]
    if device.platform != 'gpu' or 'cuda' not in device.client.platform_version:
        raise NotImplementedError(f'platform: cudnn needs an NVIDIA GPU; this process runs on {device.platform}')
    major, minor = device.compute_capability.split('.')
    return int(major), int(minor)


_NO_JAX_ARGUMENT = "JAX's cuDNN call has no such argument"


def _check_supported(call: AttentionCall, capability: tuple[int, int]) -> None:
    """Raise NotImplementedError, with argument and reason, if cuDNN cannot compute the call."""
    T, S = call.query.shape[1], call.key.shape[1]
    dtype, width = call.query.dtype, max(call.query.shape[-1], call.value.shape[-1])
    largest_width = 256 if capability[0] == 9 else 128
    raise_unsupported([
        ('platform', capability < (8, 0), f'cuDNN needs compute capability 8.0; this GPU has {capability}'),
        ('query', dtype not in (jnp.bfloat16, jnp.float16), f'cuDNN takes bfloat16 and float16, not {dtype}'),
        ('query', width > largest_width,
         f'on this GPU cuDNN has a gradient for heads of width up to {largest_width}, not {width}'),
        # Its gradient may hold NaN (cudnn-frontend#1072).
        ('query', T == 1, 'cuDNN is not reliable for one query row, and no faster'),
        ('key', call.key.dtype != dtype, f'its dtype {call.key.dtype} is not that of query, {dtype}'),
        ('value', call.value.dtype != dtype, f'its dtype {call.value.dtype} is not that of query, {dtype}'),
        ('scale', isinstance(call.scale, jax.Array), 'cuDNN takes a number, not an array'),
        ('logits_soft_cap', call.logits_soft_cap is not None, _NO_JAX_ARGUMENT),
        ('sinks', call.sinks is not None, _NO_JAX_ARGUMENT),
        ('alibi_slopes', call.alibi_slopes is not None, _NO_JAX_ARGUMENT),
        ('dropout_rate', call.dropout_rate > 0.0, 'cuDNN drops other weights than the implementations here'),
        ('block_sizes', call.block_sizes is not None, 'cuDNN chooses its own'),
        ('return_weights', call.return_weights, 'cuDNN never forms them'),
        ('return_residual', call.return_residual, f'JAX rounds it to {dtype}'),
        *_mask_refusals(call.mask, call.bias is not None or call.mask.mask is not None, T, S),
        *_pair_array_refusals(call, T, S),
    ])  # fmt: skip


def _mask_refusals(mask: Mask, has_bias: bool, T: int, S: int) -> list[tuple[str, bool, str]]:
    left, right = sanitize.effective_window(mask)
    compares_positions = mask.is_causal or mask.window is not None
    return [
        ('prefix_lengths', mask.prefix_lengths is not None, 'cuDNN has no prefix mask'),
        ('query_segment_ids', mask.query_segment_ids is not None, _NO_JAX_ARGUMENT),
        ('query_positions', compares_positions and mask.query_positions is not None, 'cuDNN uses row numbers'),
        ('key_positions', compares_positions and mask.key_positions is not None, 'cuDNN uses column numbers'),
        # A bias can hold any window.  Without one, cuDNN has only windows that end at the diagonal.
        ('local_window_size', not has_bias and right > 0 and (left < T - 1 or right < S - 1),
         f'cuDNN has windows to the left that end at the query, not {mask.window}'),
    ]  # fmt: skip


def _pair_array_refusals(call: AttentionCall, T: int, S: int) -> list[tuple[str, bool, str]]:
    pair_arrays = {name: x for name, x in (('mask', call.mask.mask), ('bias', call.bias)) if x is not None}
    if not pair_arrays:
        return []
    shapes = [x.shape for x in pair_arrays.values()]
    full_shape = (*np.broadcast_shapes(*shapes)[:2], T, S)
    name, query_dtype = next(iter(pair_arrays)), call.query.dtype
    bias_dtype = pair_arrays['bias'].dtype if 'bias' in pair_arrays else query_dtype
    came = ' and '.join(map(str, shapes))
    return [
        ('bias', bias_dtype != query_dtype, f'its dtype {bias_dtype} is not that of query, {query_dtype}'),
        (name, query_dtype == jnp.float16, 'cuDNN adds it in float16, where no number is low enough to hide a key'),
        (name, full_shape not in shapes, f'cuDNN needs it broadcast from {came} to {full_shape}'),
        (name, bool(T % 2 or S % 2), f'with it cuDNN needs even lengths, not {T} and {S}'),
    ]


def _merge_mask_into_bias(call: AttentionCall) -> tuple[AttentionCall, Array | None]:
    """Return the call and the bias for cuDNN, which is None if the call has neither mask array nor bias.

    The mask of the returned call also hides the pairs whose bias is -inf.  The returned bias holds `HIDDEN_LOGIT` at
    every pair that the mask hides.
    """
    (T, S), mask, bias = (call.query.shape[1], call.key.shape[1]), call.mask.mask, call.bias
    if bias is not None:  # a bias of -inf hides a pair as a mask does
        shown = bias > -jnp.inf
        mask = (shown | jnp.isnan(bias)) if mask is None else mask & (shown | jnp.isnan(bias))
    if mask is None:
        return call, None
    call = call._replace(mask=call.mask.replace(mask=mask))
    allowed = mask_as_array(call.mask, T, S)
    assert allowed is not None
    # Where one entry of the array serves several batch rows or heads, it shows a pair that any of them may attend to.
    broadcast_axes = [axis for axis in range(4) if mask.shape[axis] == 1 < allowed.shape[axis]]
    allowed_by_any = jnp.any(allowed, axis=broadcast_axes, keepdims=True)
    zero = jnp.zeros((), call.query.dtype)
    hidden_logit = jnp.asarray(HIDDEN_LOGIT, call.query.dtype)
    return call, jnp.where(allowed_by_any, zero if bias is None else bias, hidden_logit)


def _call_cudnn(call: AttentionCall, bias: Array | None) -> Array:
    """Return cuDNN's output [B, T, N, Hv]; rows that may attend to no key hold arbitrary numbers."""
    B, T, _, H = call.query.shape
    S, Hv = call.key.shape[1], call.value.shape[-1]
    width = -(-max(H, Hv) // 8) * 8
    query, key, value = (
        jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, width - x.shape[-1]))) for x in (call.query, call.key, call.value)
    )
    left, right = sanitize.effective_window(call.mask)
    # A window to the left needs is_causal: without it cuDNN allows all later keys (jax#39576).
    is_windowed = bias is None and right == 0 and left < T - 1
    lengths = _lengths(call, B, T, S, left if is_windowed else None)
    query, key, value, bias, *lengths = _vmapped_together(query, key, value, bias, *lengths)
    output = jax.nn.dot_product_attention(
        query, key, value, bias, scale=float(call.scale), is_causal=right == 0, implementation='cudnn',
        local_window_size=(left, 0) if is_windowed else None,
        query_seq_lengths=lengths[0], key_value_seq_lengths=lengths[1],
    )  # fmt: skip
    return output[..., :Hv]


def _lengths(call: AttentionCall, B: int, T: int, S: int, left: int | None) -> tuple[Array, Array] | tuple[None, None]:
    """Return lengths of queries and keys for cuDNN, [B] int32 each, or (None, None) if it needs none.

    Under a window the last query rows may have no visible key; the length of the queries excludes them.
    `left`: the size of the window, or None.
    """
    queries, keys = call.mask.query_seq_lengths, call.mask.key_value_seq_lengths
    # Without lengths, cuDNN does not mask the end of a block of keys reliably (pytorch#196678), and has no window for
    # T > S.
    if queries is None and keys is None and S % 128 == 0 and (left is None or T <= S):
        return None, None
    keys = jnp.full(B, S) if keys is None else jnp.maximum(sanitize.clip_lengths(keys, S), 1)
    queries = jnp.full(B, T) if queries is None else sanitize.clip_lengths(queries, T)
    if left is not None:
        queries = jnp.minimum(queries, keys + left)
    return jnp.maximum(queries, 1).astype(jnp.int32), keys.astype(jnp.int32)


def _vmapped_together(*arrays: Array | None) -> list[Any]:
    """Return the same values, all of them mapped by `jax.vmap` if any of them is.

    JAX's batching rule for cuDNN assumes this.  Otherwise it fails, or a bias that all mapped calls share gets the sum
    of their gradients in each of them.  The compiler removes these operations.
    """
    never = jnp.zeros((), bool)
    for x in arrays:
        never = never if x is None else never | (x[(0,) * x.ndim] != 0)
    never &= False
    return [None if x is None else jnp.where(never, jnp.zeros_like(x), x) for x in arrays]
