"""Attention over tokens that are divided over devices (Liu et al. 2023, "Ring Attention with Blockwise Transformers").

Each device keeps its queries; keys and values go round the devices of the mesh axis `axes.SEQUENCE_AXIS`, and what a device
makes of each part (`kernels.flash`) is merged by the online softmax.  The gradient goes round once more, and those of
key and value travel with them.  No device holds more than its T / n tokens, a few times.

In causal attention the first tokens have little to see and the last ones all.  So the row is cut into 2 n chunks, and
device d works on the chunks d and 2 n - 1 - d (as in zhuzilin's zigzag; Brandon et al. 2023, "Striped Attention", have
the problem and another order): in every turn each sees as many pairs, and the tiles that none sees are skipped.
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
from attnlab.kernels.flash import FloatInputs, OtherInputs
from attnlab.kernels.tiles import BlockStarts, TileGrid


class RingConfig(NamedTuple):
    """What is fixed when the program is made.  plan: of one device's queries and one device's keys."""

    plan: flash.FlashConfig
    mesh: AbstractMesh
    rows: tuple[str, ...]  # the axes of the mesh that batch rows are divided over
    heads: str | None  # that which heads are
    folded: bool  # whether device d works on chunks d and 2 n - 1 - d

    @property
    def size(self) -> int:
        return self.mesh.shape[mesh_axes.SEQUENCE_AXIS]


def dot_product(call: AttentionCall) -> AttentionOutput:
    """As `dense.dot_product`, on the mesh in context; memory O((T + S) / n) a device, forward and backward.

    Raises NotImplementedError, naming the argument, where there is no such mesh and for what is in `_refuse`.
    """
    mesh = _mesh()
    _refuse(call, mesh.shape[mesh_axes.SEQUENCE_AXIS])
    if 0 in call.query.shape or 0 in call.value.shape:  # nothing to divide
        return dense.dot_product(call._replace(block_sizes=None))
    floats, others = flash.flash_inputs(call)
    floats = derivatives.reverse_mode_only(floats, 'ring')
    attended: Any = _attend(ring_config(call, mesh, jax.default_backend()), floats, others)
    output, lse = attended
    limits = jnp.finfo(lse.dtype)
    alone = jnp.full((), limits.min) if floats.sinks is None else floats.sinks[None, :, :, None]
    residual = jax.lax.stop_gradient(jnp.where(lse == limits.max, alone, lse))
    B, T, N, _ = call.query.shape
    output, residual = (x.reshape(B, N, T, *x.shape[4:]).swapaxes(1, 2) for x in (output, residual))
    return AttentionOutput(output.astype(call.query.dtype), residual if call.return_residual else None, None)


def pays(call: AttentionCall, platform: str) -> bool:
    """Whether the mesh in context divides tokens over devices."""
    return jax.sharding.get_abstract_mesh().shape.get(mesh_axes.SEQUENCE_AXIS, 1) > 1


def _mesh() -> AbstractMesh:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh_axes.SEQUENCE_AXIS not in mesh.shape:
        raise NotImplementedError(
            f'mesh: ring needs one with an axis {mesh_axes.SEQUENCE_AXIS!r} in context (jax.set_mesh)'
        )
    if not mesh.are_all_axes_auto:
        raise NotImplementedError(f'mesh: ring divides it itself, and its axes are {mesh.axis_types}, not all Auto')
    return mesh


def _refuse(call: AttentionCall, size: int) -> None:
    """Raises NotImplementedError for what ring does not serve, with the reason."""
    T, S = call.query.shape[1], call.key.shape[1]
    raise_unsupported([
        ('query', bool(T % size), f'its {T} tokens do not divide over {size} devices'),
        ('key', bool(S % size), f'its {S} tokens do not divide over {size} devices'),
        ('bias', call.bias is not None, 'ring adds none of an array'),
        ('mask', call.mask.mask is not None, 'ring takes no array'),
        ('return_weights', call.return_weights, 'ring never forms them'),
    ])  # fmt: skip


def ring_config(call: AttentionCall, mesh: AbstractMesh, platform: str) -> RingConfig:
    """How the call lies on the devices of the mesh.  Raises NotImplementedError where no tile size fits."""
    (B, T, N, _), (S, K) = call.query.shape, call.key.shape[1:3]
    size = mesh.shape[mesh_axes.SEQUENCE_AXIS]
    heads = (
        mesh_axes.TENSOR_AXIS
        if mesh_axes.TENSOR_AXIS in mesh.shape and K % mesh.shape[mesh_axes.TENSOR_AXIS] == 0
        else None
    )  # then N does too
    folded = call.mask.is_causal and size > 1 and T % (2 * size) == S % (2 * size) == 0
    chunks = size * (2 if folded else 1)
    queries, keys = _blocks(call, T // chunks, S // chunks, N // (mesh.shape[heads] if heads else 1), platform)
    rows = mesh_axes.batch_axes_dividing(mesh.shape, B)
    several = B > math.prod(mesh.shape[axis] for axis in rows)  # batch rows on a device
    plan = flash.FlashConfig(
        TileGrid(T // size, S // size, queries, keys), T, call.logits_soft_cap, call.dropout_rate,
        platform != 'cpu' and several,
    )  # fmt: skip
    return RingConfig(plan, mesh, rows, heads, folded)


def _blocks(call: AttentionCall, queries: int, keys: int, N: int, platform: str) -> tuple[int, int]:
    """Sizes of the tiles that chunks of so many queries and keys divide into, none of which spans two chunks."""
    limits = call.block_sizes or blockwise.default_block_sizes(queries, keys, N, platform)
    steps = 1, 2 if call.dropout_rate else 1  # dropout draws for pairs of keys
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
def _attend(ring: RingConfig, floats: FloatInputs, others: OtherInputs) -> tuple[Array, Array]:
    """Output [B, K, G, T, Hv] and log-sum-exp of each row [B, K, G, T], the largest number where it is empty."""
    return _forward(ring, floats, others)[0]


OUTPUT, LSE = 'BKGTH', 'BKGT'
"""The axes of an output or its cotangent, and of the log-sum-exp."""


def _forward(ring: RingConfig, floats: FloatInputs, others: OtherInputs) -> tuple[tuple[Array, Array], tuple]:
    arrays = floats, others
    attended = _on_each_device(ring, _forward_part, arrays, _axes(*arrays), (OUTPUT, LSE))
    return attended, (*arrays, *attended)


def _backward(ring: RingConfig, saved: tuple, d_outs: tuple[Array, Array]) -> tuple[FloatInputs, None]:
    return _gradients(ring, *saved, d_outs[0]), None  # None: integers have no gradient


def _gradients_once(
    ring: RingConfig, floats: FloatInputs, others: OtherInputs, output: Array, lse: Array, d_out: Array
) -> FloatInputs:
    letters = _axes(floats, others)
    arrays = floats, others, output, lse, d_out
    wide = _on_each_device(ring, _backward_part, arrays, (*letters, OUTPUT, LSE, OUTPUT), letters[0])
    return jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), wide, floats)


_gradients = derivatives.first_order_only(_gradients_once, 'ring')
_attend.defvjp(_forward, _backward)


# How arrays lie on the devices


def _axes(floats: FloatInputs, others: OtherInputs) -> Any:
    """The same trees, with the axes of each array in its place."""
    return flash.map_inputs(lambda _, letters: letters, floats, others)


def _on_each_device(ring: RingConfig, function: Any, arrays: Any, letters: Any, out_letters: Any) -> Any:
    """`function(ring, *arrays)` on each device with its part of every array, tokens in the order of the work.

    letters: trees like arrays and results, with the axes of each array; they decide how it is divided.
    """

    def part(*arrays: Any) -> Any:
        results = function(ring, *jax.tree.map(partial(_turned, ring, _fold), arrays, letters))
        return jax.tree.map(partial(_turned, ring, _unfold), results, out_letters)

    # All that is replicated is made the same on every device, in this file: nothing here is left for JAX to check.
    return jax.shard_map(
        part, mesh=ring.mesh, in_specs=jax.tree.map(lambda x, one: _spec(ring, one, x.shape[0]), arrays, letters),
        out_specs=jax.tree.map(partial(_spec, ring), out_letters), check_vma=False,
    )(*arrays)  # fmt: skip


def _spec(ring: RingConfig, letters: str, rows: int | None = None) -> PartitionSpec:
    divided = {
        'B': None if rows == 1 else ring.rows,
        'K': ring.heads,
        'T': mesh_axes.SEQUENCE_AXIS,
        'S': mesh_axes.SEQUENCE_AXIS,
    }
    return PartitionSpec(*(divided.get(letter) for letter in letters))


def _turned(ring: RingConfig, turn: Any, x: Array, letters: str) -> Array:
    tokens = [axis for axis, letter in enumerate(letters) if letter in 'TS']
    return turn(x, tokens[0], ring.size) if ring.folded and tokens else x


def _homes(size: int, chunk: int) -> list[tuple[int, int]]:
    """(from, to): where each device's first (0) or second (1) chunk of the row is worked on.

    The even chunks have one home each and so have the odd ones: two permutations take everything home.
    """
    numbers = range(chunk, 2 * size, 2)
    return [(device, min(number, 2 * size - 1 - number)) for device, number in enumerate(numbers)]


def _fold(x: Array, axis: int, size: int) -> Array:
    """A device's chunks 2 d and 2 d + 1 given for its chunks d and 2 n - 1 - d."""
    halves = jnp.split(x, 2, axis)
    even, odd = (jax.lax.ppermute(half, mesh_axes.SEQUENCE_AXIS, _homes(size, i)) for i, half in enumerate(halves))
    return jnp.concatenate(_in_order(even, odd), axis)


def _unfold(x: Array, axis: int, size: int) -> Array:
    """`_fold` undone."""
    halves = _in_order(*jnp.split(x, 2, axis))
    back = [[(there, here) for here, there in _homes(size, i)] for i in range(2)]
    chunks = (jax.lax.ppermute(half, mesh_axes.SEQUENCE_AXIS, moves) for half, moves in zip(halves, back, strict=True))
    return jnp.concatenate(list(chunks), axis)


def _in_order(one: Array, other: Array) -> list[Array]:
    """Chunk d is even on an even device: (even, odd) chunks as (d, 2 n - 1 - d) and back."""
    even = jax.lax.axis_index(mesh_axes.SEQUENCE_AXIS) % 2 == 0
    return [jnp.where(even, one, other), jnp.where(even, other, one)]


def device_block_starts(ring: RingConfig, device: Int[Array, ''], length: int, block: int) -> Int[Array, ' blocks']:
    """The row numbers that the blocks of a device's `length` queries or keys begin at."""
    chunks = [device, 2 * ring.size - 1 - device] if ring.folded else [device]
    size = length // len(chunks)
    return jnp.concatenate([chunk * size + jnp.arange(0, size, block) for chunk in chunks])


# What a device does


def ring_block_starts(ring: RingConfig, device: Int[Array, ''], source: Int[Array, '']) -> BlockStarts:
    """Row numbers of the blocks of one device's queries and of another's keys."""
    grid = ring.plan.grid
    return BlockStarts(
        device_block_starts(ring, device, grid.T, grid.queries), device_block_starts(ring, source, grid.S, grid.keys)
    )


def _inputs(ring: RingConfig, floats: FloatInputs, others: OtherInputs, turn: Int[Array, '']) -> flash.FlashInputs:
    """The arguments of `flash` after so many turns, without the sinks: they count once."""
    device = jax.lax.axis_index(mesh_axes.SEQUENCE_AXIS)
    number = others.number
    if ring.heads is not None:  # dropout counts heads: b N + n as (b parts + part) (N / parts) + n
        number = number * ring.mesh.shape[ring.heads] + jax.lax.axis_index(ring.heads)
    others = others._replace(number=number, begin=ring_block_starts(ring, device, (device - turn) % ring.size))
    return floats._replace(sinks=None), others


def _parted(floats: FloatInputs, others: OtherInputs) -> tuple[flash.FlashInputs, flash.FlashInputs]:
    """The arrays that stay on the device, and those that go round: all that have keys."""
    going = flash.map_inputs(lambda x, letters: x if 'S' in letters else None, floats, others)
    return flash.map_inputs(lambda x, letters: None if 'S' in letters else x, floats, others), going


def _pass_on(ring: RingConfig, tree: Any) -> Any:
    """To the next device, from the one before."""
    moves = [(device, (device + 1) % ring.size) for device in range(ring.size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, mesh_axes.SEQUENCE_AXIS, moves), tree)


def _forward_part(ring: RingConfig, floats: FloatInputs, others: OtherInputs) -> tuple[Array, Array]:
    """Output and log-sum-exp of a device's queries."""
    query, value, sinks = floats.query, floats.value, floats.sinks
    lowest = jnp.finfo(query.dtype).min
    own, going = _parted(floats, others)

    def turn(state: tuple, number: Array) -> tuple[tuple, None]:
        going, output, lse = state
        after = _pass_on(ring, going)  # meanwhile; after the last turn all is home again
        more, log, _ = flash.flash_forward(ring.plan, *_inputs(ring, *flash.merge_inputs(own, going), number))
        return (after, *_merged(output, lse, more, log)), None

    nothing = jnp.zeros((*query.shape[:-1], value.shape[-1]), query.dtype), jnp.full(query.shape[:-1], lowest)
    (_, output, lse), _ = jax.lax.scan(turn, (going, *nothing), jnp.arange(ring.size))
    empty = lse == lowest
    if sinks is not None:
        log, lse = lse, jnp.logaddexp(lse, sinks[None, :, :, None])
        output = output * jnp.exp(log - lse)[..., None]
    return output, flash.lse_for_gradient(empty, lse)


def _merged(output: Array, lse: Array, more: Array, log: Array) -> tuple[Array, Array]:
    """Two outputs over different keys, and their log-sum-exps, as one over all of the keys."""
    both = jnp.logaddexp(lse, log)
    return output * jnp.exp(lse - both)[..., None] + more * jnp.exp(log - both)[..., None], both


def _backward_part(ring: RingConfig, floats: FloatInputs, others: OtherInputs, *saved: Array) -> FloatInputs:
    """Gradients of a device's floating-point arrays.  saved: output, log-sum-exp and cotangent."""
    own, going = _parted(floats, others)

    def turn(state: tuple, number: Array) -> tuple[tuple, None]:
        going, sums = state
        made = flash.flash_gradients(ring.plan, *_inputs(ring, *flash.merge_inputs(own, going), number), *saved)
        sums = jax.tree.map(jnp.add, sums, made)
        key, value = _pass_on(ring, (sums.key, sums.value))
        return (_pass_on(ring, going), sums._replace(key=key, value=value)), None

    start = jax.tree.map(lambda x: jnp.zeros(x.shape, floats.query.dtype), floats._replace(sinks=None))
    (_, sums), _ = jax.lax.scan(turn, (going, start), jnp.arange(ring.size))
    sinks = None if floats.sinks is None else flash.sink_gradient(floats.sinks, *saved)
    sinks, slopes = jax.lax.psum((sinks, sums.slopes), (*ring.rows, mesh_axes.SEQUENCE_AXIS))
    return sums._replace(sinks=sinks, slopes=slopes)
