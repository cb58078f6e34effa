"""Attention over tokens that are divided over devices (Liu et al. 2023, "Ring Attention with Blockwise Transformers").

Each device keeps its queries.  Keys and values move around the devices of the mesh axis `mesh_axes.SEQUENCE_AXIS`; each
device computes its queries with each part of the keys (`attnlab.kernels.flash`), and the partial results are merged by
the online softmax.  In the backward pass keys and values move around once more, and their gradients with them.  No
device holds more than a few times its T / n tokens.

In causal attention the first tokens attend to few keys and the last ones to all.  To balance the work, the row is cut
into 2 n chunks, and device d works on the chunks d and 2 n - 1 - d (as in zhuzilin's zigzag; Brandon et al. 2023,
"Striped Attention", solve the problem with another order).  Then all devices have equally many visible pairs in every
step; hidden tiles are skipped.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Int

from attnlab.kernels import blockwise, dense, derivatives, flash, mesh_axes
from attnlab.kernels.call import AttentionCall, AttentionOutput, raise_unsupported
from attnlab.kernels.flash_layout import (
    FlashConfig,
    FlashInputs,
    FloatInputs,
    OtherInputs,
    flash_inputs,
    map_inputs,
    merge_inputs,
)
from attnlab.kernels.tiles import BlockStarts, TileGrid


class RingConfig(NamedTuple):
    """Constants of the compiled program."""

    flash_config: FlashConfig  # for the queries of one device and the keys of one device
    mesh: AbstractMesh
    batch_axes: tuple[str, ...]  # the mesh axes over which batch rows are divided
    head_axis: str | None  # the mesh axis over which heads are divided
    is_folded: bool  # whether device d works on the chunks d and 2 n - 1 - d

    @property
    def size(self) -> int:
        """The number n of devices over which tokens are divided."""
        return self.mesh.shape[mesh_axes.SEQUENCE_AXIS]


def dot_product(call: AttentionCall) -> AttentionOutput:
    """Return the same as `dense.dot_product`, computed on the mesh in context.

    Memory is O((T + S) / n) a device, forward and backward.  Raises NotImplementedError, with the argument, if there is
    no such mesh, or the call is not supported (see `_check_supported`).
    """
    mesh = _mesh_in_context()
    _check_supported(call, mesh.shape[mesh_axes.SEQUENCE_AXIS])
    if 0 in call.query.shape or 0 in call.value.shape:  # nothing to divide
        return dense.dot_product(call._replace(block_sizes=None))
    floats, others = flash_inputs(call)
    floats = derivatives.reverse_mode_only(floats, 'ring')
    outputs: Any = _attention(ring_config(call, mesh, jax.default_backend()), floats, others)
    output, lse = outputs
    limits = jnp.finfo(lse.dtype)
    empty_lse = jnp.full((), limits.min) if floats.sinks is None else floats.sinks[None, :, :, None]
    residual = jax.lax.stop_gradient(jnp.where(lse == limits.max, empty_lse, lse))
    B, T, N, _ = call.query.shape
    output, residual = (x.reshape(B, N, T, *x.shape[4:]).swapaxes(1, 2) for x in (output, residual))
    return AttentionOutput(output.astype(call.query.dtype), residual if call.return_residual else None, None)


def is_preferred(call: AttentionCall, platform: str) -> bool:
    """Return whether the mesh in context divides tokens over devices."""
    return jax.sharding.get_abstract_mesh().shape.get(mesh_axes.SEQUENCE_AXIS, 1) > 1


def _mesh_in_context() -> AbstractMesh:
    mesh = jax.sharding.get_abstract_mesh()
    axis = mesh_axes.SEQUENCE_AXIS
    if axis not in mesh.shape:
        raise NotImplementedError(f'mesh: ring needs one with an axis {axis!r} in context (jax.set_mesh)')
    if not mesh.are_all_axes_auto:
        raise NotImplementedError(f'mesh: ring needs axes of type Auto, because it divides arrays itself; '
                                  f'the types are {mesh.axis_types}')  # fmt: skip
    return mesh


def _check_supported(call: AttentionCall, size: int) -> None:
    """Raise NotImplementedError, with argument and reason, if ring cannot compute the call."""
    T, S = call.query.shape[1], call.key.shape[1]
    raise_unsupported([
        ('query', bool(T % size), f'its {T} tokens do not divide over {size} devices'),
        ('key', bool(S % size), f'its {S} tokens do not divide over {size} devices'),
        ('bias', call.bias is not None, 'ring takes no bias array'),
        ('mask', call.mask.mask is not None, 'ring takes no mask array'),
        ('return_weights', call.return_weights, 'ring never forms them'),
    ])  # fmt: skip


def ring_config(call: AttentionCall, mesh: AbstractMesh, platform: str) -> RingConfig:
    """Return how the call is divided over the mesh.  Raises NotImplementedError if no tile size fits."""
    (B, T, N, _), (S, K) = call.query.shape, call.key.shape[1:3]
    size = mesh.shape[mesh_axes.SEQUENCE_AXIS]
    axis = mesh_axes.TENSOR_AXIS
    head_axis = axis if axis in mesh.shape and K % mesh.shape[axis] == 0 else None  # then N divides too
    is_folded = call.mask.is_causal and size > 1 and T % (2 * size) == S % (2 * size) == 0
    chunks = size * (2 if is_folded else 1)
    local_heads = N // (mesh.shape[head_axis] if head_axis else 1)
    queries, keys = _tile_sizes(call, T // chunks, S // chunks, local_heads, platform)
    batch_axes = mesh_axes.batch_axes_dividing(mesh.shape, B)
    has_several_rows = B > math.prod(mesh.shape[axis] for axis in batch_axes)  # on one device
    config = FlashConfig(
        TileGrid(T // size, S // size, queries, keys), T, call.logits_soft_cap, call.dropout_rate,
        platform != 'cpu' and has_several_rows,
    )  # fmt: skip
    return RingConfig(config, mesh, batch_axes, head_axis, is_folded)


def _tile_sizes(call: AttentionCall, queries: int, keys: int, N: int, platform: str) -> tuple[int, int]:
    """Return (queries, keys) of a tile that divides chunks of `queries` and `keys`, so that no tile spans two chunks.

    Raises NotImplementedError if every such tile is too small.
    """
    limits = call.block_sizes or blockwise.default_block_sizes(queries, keys, N, platform)
    steps = 1, 2 if call.dropout_rate else 1  # dropout draws random numbers for pairs of keys
    sizes = []
    for name, chunk, limit, step in zip(('query', 'key'), (queries, keys), limits, steps, strict=True):
        if chunk % step:
            raise NotImplementedError(f'dropout_rate: ring draws for pairs of keys, and a device has {chunk} in a row')
        limit = max(min(limit, chunk) // step, 1) * step
        largest = next(x for x in range(limit, 0, -step) if chunk % x == 0)
        if largest < limit // 8:
            raise NotImplementedError(f'{name}: chunks of {chunk} tokens do not divide into tiles of up to {limit}')
        sizes.append(largest)
    return sizes[0], sizes[1]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(config: RingConfig, floats: FloatInputs, others: OtherInputs) -> tuple[Array, Array]:
    """Return output [B, K, G, T, Hv] and log-sum-exp [B, K, G, T]; that of an empty row is the largest number."""
    return _vjp_forward(config, floats, others)[0]


OUTPUT_AXES, LSE_AXES = 'BKGTH', 'BKGT'
"""The axes of the output or its cotangent, and of the log-sum-exp."""


def _vjp_forward(config: RingConfig, floats: FloatInputs, others: OtherInputs) -> tuple[tuple[Array, Array], tuple]:
    inputs = floats, others
    outputs = _run_on_devices(config, _forward_on_device, inputs, _input_axes(*inputs), (OUTPUT_AXES, LSE_AXES))
    return outputs, (*inputs, *outputs)


def _vjp_backward(config: RingConfig, saved: tuple, d_outs: tuple[Array, Array]) -> tuple[FloatInputs, None]:
    return _gradients(config, *saved, d_outs[0]), None  # None: integers have no gradient


def _ring_gradients(
    config: RingConfig, floats: FloatInputs, others: OtherInputs, output: Array, lse: Array, d_out: Array
) -> FloatInputs:
    input_axes = _input_axes(floats, others)
    arrays, array_axes = (floats, others, output, lse, d_out), (*input_axes, OUTPUT_AXES, LSE_AXES, OUTPUT_AXES)
    wide = _run_on_devices(config, _backward_on_device, arrays, array_axes, input_axes[0])
    return jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), wide, floats)


_gradients = derivatives.first_order_only(_ring_gradients, 'ring')
_attention.defvjp(_vjp_forward, _vjp_backward)


# Division of arrays over devices


def _input_axes(floats: FloatInputs, others: OtherInputs) -> Any:
    """Return the same trees with the axes of each array, such as 'BKSH', in its place."""
    return map_inputs(lambda _, axes: axes, floats, others)


def _run_on_devices(config: RingConfig, function: Any, arrays: Any, array_axes: Any, result_axes: Any) -> Any:
    """Return `function(config, *arrays)`, computed on each device with its part of every array.

    If folded, each device gets the tokens that it works on.  `array_axes` and `result_axes` are trees like arrays and
    results, with the axes of each array; they determine how the array is divided.
    """

    def run_on_device(*arrays: Any) -> Any:
        results = function(config, *jax.tree.map(partial(_move_chunks, config, _fold), arrays, array_axes))
        return jax.tree.map(partial(_move_chunks, config, _unfold), results, result_axes)

    # The replicated outputs are made equal on all devices in this file, so JAX need not check it.
    return jax.shard_map(
        run_on_device, mesh=config.mesh,
        in_specs=jax.tree.map(lambda x, axes: _partition_spec(config, axes, x.shape[0]), arrays, array_axes),
        out_specs=jax.tree.map(partial(_partition_spec, config), result_axes), check_vma=False,
    )(*arrays)  # fmt: skip


def _partition_spec(config: RingConfig, axes: str, rows: int | None = None) -> PartitionSpec:
    tokens = mesh_axes.SEQUENCE_AXIS
    mesh_axis_of = {'B': None if rows == 1 else config.batch_axes, 'K': config.head_axis, 'T': tokens, 'S': tokens}
    return PartitionSpec(*(mesh_axis_of.get(axis) for axis in axes))


def _move_chunks(config: RingConfig, move: Any, x: Array, axes: str) -> Array:
    """Apply `move`, which is `_fold` or `_unfold`, along the token axis of x, if it has one and the ring is folded."""
    token_axes = [i for i, axis in enumerate(axes) if axis in 'TS']
    return move(x, token_axes[0], config.size) if config.is_folded and token_axes else x


def _chunk_moves(size: int, half: int) -> list[tuple[int, int]]:
    """Return (from, to) device pairs that bring each device's first (0) or second (1) chunk to where it is worked on.

    The first chunks have even numbers and the second odd ones.  Each kind has one worker on every device, so two
    permutations move all chunks.
    """
    chunks = range(half, 2 * size, 2)
    return [(device, min(chunk, 2 * size - 1 - chunk)) for device, chunk in enumerate(chunks)]


def _fold(x: Array, axis: int, size: int) -> Array:
    """Exchange a device's chunks 2 d and 2 d + 1 for its chunks d and 2 n - 1 - d."""
    halves = jnp.split(x, 2, axis)
    even, odd = (
        jax.lax.ppermute(half, mesh_axes.SEQUENCE_AXIS, _chunk_moves(size, i)) for i, half in enumerate(halves)
    )
    return jnp.concatenate(_swap_on_odd_devices(even, odd), axis)


def _unfold(x: Array, axis: int, size: int) -> Array:
    """Reverse `_fold`."""
    halves = _swap_on_odd_devices(*jnp.split(x, 2, axis))
    moves_back = [[(target, source) for source, target in _chunk_moves(size, i)] for i in range(2)]
    chunks = (
        jax.lax.ppermute(half, mesh_axes.SEQUENCE_AXIS, moves) for half, moves in zip(halves, moves_back, strict=True)
    )
    return jnp.concatenate(list(chunks), axis)


def _swap_on_odd_devices(first: Array, second: Array) -> list[Array]:
    """Reorder (even, odd) chunks to (d, 2 n - 1 - d), or back: chunk d is even on an even device."""
    is_even = jax.lax.axis_index(mesh_axes.SEQUENCE_AXIS) % 2 == 0
    return [jnp.where(is_even, first, second), jnp.where(is_even, second, first)]


def device_block_starts(config: RingConfig, device: Int[Array, ''], length: int, block: int) -> Int[Array, ' blocks']:
    """Return the first row number of each block of a device's `length` queries or keys."""
    chunks = [device, 2 * config.size - 1 - device] if config.is_folded else [device]
    chunk_length = length // len(chunks)
    return jnp.concatenate([chunk * chunk_length + jnp.arange(0, chunk_length, block) for chunk in chunks])


# Computation on one device


def ring_block_starts(config: RingConfig, device: Int[Array, ''], source: Int[Array, '']) -> BlockStarts:
    """Return the first row numbers of the blocks of the queries of `device` and of the keys of `source`."""
    grid = config.flash_config.grid
    return BlockStarts(
        device_block_starts(config, device, grid.T, grid.queries),
        device_block_starts(config, source, grid.S, grid.keys),
    )


def _inputs_of_step(config: RingConfig, floats: FloatInputs, others: OtherInputs, step: Int[Array, '']) -> FlashInputs:
    """Return the inputs of `flash` in a step of the ring, without the sinks, which are added once at the end."""
    device = jax.lax.axis_index(mesh_axes.SEQUENCE_AXIS)
    batch_row = others.batch_row
    if config.head_axis is not None:
        # Dropout numbers heads by b N + n, which is (b parts + part) (N / parts) + n' for the head n' of this part.
        parts, part = config.mesh.shape[config.head_axis], jax.lax.axis_index(config.head_axis)
        batch_row = batch_row * parts + part
    source = (device - step) % config.size
    others = others._replace(batch_row=batch_row, block_starts=ring_block_starts(config, device, source))
    return floats._replace(sinks=None), others


def _split_moving_inputs(floats: FloatInputs, others: OtherInputs) -> tuple[FlashInputs, FlashInputs]:
    """Split the inputs into those that stay on the device, and those that move: all arrays with a key axis."""
    staying = map_inputs(lambda x, axes: None if 'S' in axes else x, floats, others)
    return staying, map_inputs(lambda x, axes: x if 'S' in axes else None, floats, others)


def _pass_on(config: RingConfig, tree: Any) -> Any:
    """Send the arrays to the next device, and return those of the previous one."""
    moves = [(device, (device + 1) % config.size) for device in range(config.size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, mesh_axes.SEQUENCE_AXIS, moves), tree)


def _forward_on_device(config: RingConfig, floats: FloatInputs, others: OtherInputs) -> tuple[Array, Array]:
    """Return output and log-sum-exp for the queries of a device."""
    query, value, sinks = floats.query, floats.value, floats.sinks
    lowest = jnp.finfo(query.dtype).min
    staying, moving = _split_moving_inputs(floats, others)

    def ring_step(state: tuple, step: Array) -> tuple[tuple, None]:
        moving, output, lse = state
        # Sent while this step computes.  After the last step every array is on its own device again.
        next_moving = _pass_on(config, moving)
        inputs = _inputs_of_step(config, *merge_inputs(staying, moving), step)
        part_output, part_lse, _ = flash.flash_forward(config.flash_config, *inputs)
        return (next_moving, *_merge_outputs(output, lse, part_output, part_lse)), None

    zero_output = jnp.zeros((*query.shape[:-1], value.shape[-1]), query.dtype)
    initial = moving, zero_output, jnp.full(query.shape[:-1], lowest)
    (_, output, lse), _ = jax.lax.scan(ring_step, initial, jnp.arange(config.size))
    is_empty = lse == lowest
    if sinks is not None:
        lse_without_sink, lse = lse, jnp.logaddexp(lse, sinks[None, :, :, None])
        output = output * jnp.exp(lse_without_sink - lse)[..., None]
    return output, flash.lse_for_gradient(is_empty, lse)


def _merge_outputs(output_1: Array, lse_1: Array, output_2: Array, lse_2: Array) -> tuple[Array, Array]:
    """Merge two outputs over different keys, given their log-sum-exps, to output and log-sum-exp over all keys."""
    lse = jnp.logaddexp(lse_1, lse_2)
    return output_1 * jnp.exp(lse_1 - lse)[..., None] + output_2 * jnp.exp(lse_2 - lse)[..., None], lse


def _backward_on_device(config: RingConfig, floats: FloatInputs, others: OtherInputs, *saved: Array) -> FloatInputs:
    """Return the gradients of a device's floating-point inputs.  `saved`: output, log-sum-exp and cotangent."""
    staying, moving = _split_moving_inputs(floats, others)

    def ring_step(state: tuple, step: Array) -> tuple[tuple, None]:
        moving, sums = state
        inputs = _inputs_of_step(config, *merge_inputs(staying, moving), step)
        sums = jax.tree.map(jnp.add, sums, flash.flash_gradients(config.flash_config, *inputs, *saved))
        key, value = _pass_on(config, (sums.key, sums.value))
        return (_pass_on(config, moving), sums._replace(key=key, value=value)), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, floats.query.dtype), floats._replace(sinks=None))
    (_, sums), _ = jax.lax.scan(ring_step, (moving, zeros), jnp.arange(config.size))
    sinks = None if floats.sinks is None else flash.sink_gradient(floats.sinks, *saved)
    sinks, slopes = jax.lax.psum((sinks, sums.alibi_slopes), (*config.batch_axes, mesh_axes.SEQUENCE_AXIS))
    return sums._replace(sinks=sinks, alibi_slopes=slopes)
