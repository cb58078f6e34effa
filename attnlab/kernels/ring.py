"""Attention over tokens that are divided over devices (Liu et al. 2023, "Ring Attention with Blockwise Transformers").

Each device keeps its queries; keys and values go round the devices of the mesh axis `axes.TOKENS`, and what a device
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

from attnlab.kernels import axes, blockwise, dense, derivatives, dropout, flash
from attnlab.kernels.call import Attended, Call
from attnlab.kernels.tiles import Grid, Rules


class Ring(NamedTuple):
    """What is fixed when the program is made.  plan: of one device's queries and one device's keys."""

    plan: flash.Plan
    mesh: AbstractMesh
    rows: tuple[str, ...]  # the axes of the mesh that batch rows are divided over
    heads: str | None  # that which heads are
    folded: bool  # whether device d works on chunks d and 2 n - 1 - d

    @property
    def size(self) -> int:
        return self.mesh.shape[axes.TOKENS]


LETTERS = {
    'query': 'BKGTH', 'key': 'BKSH', 'value': 'BKSH', 'sinks': 'KG', 'slopes': 'KG',
    'query_seq_lengths': 'B', 'key_value_seq_lengths': 'B', 'prefix_lengths': 'B', 'number': 'B', 'words': 'W',
    'query_positions': 'BT', 'key_positions': 'BS', 'query_segment_ids': 'BT', 'key_segment_ids': 'BS',
    'output': 'BKGTH', 'total': 'BKGT', 'cotangent': 'BKGTH',
}  # fmt: skip
"""The axes of each array, which tell how it is divided.  What has an S goes round."""

Arrays = dict[str, Array]


def dot_product(call: Call) -> Attended:
    """As `dense.dot_product`, on the mesh in context; memory O((T + S) / n) a device, forward and backward.

    Raises NotImplementedError, naming the argument, where there is no such mesh and for what is in `_refuse`.
    """
    mesh = _mesh()
    _refuse(call, mesh.shape[axes.TOKENS])
    if 0 in call.query.shape or 0 in call.value.shape:  # nothing to divide
        return dense.dot_product(call._replace(block_sizes=None))
    floats, others = _arrays(call)
    floats = derivatives.reverse_only(floats, 'ring')
    attended: Any = _attend(divided(call, mesh, jax.default_backend()), floats, others)
    output, total = attended
    sums = total.dtype
    alone = jnp.full((), jnp.finfo(sums).min) if call.sinks is None else floats['sinks'][None, :, :, None]
    residual = jax.lax.stop_gradient(jnp.where(total == jnp.finfo(sums).max, alone, total))
    B, T, N, _ = call.query.shape
    output, residual = (x.reshape(B, N, T, *x.shape[4:]).swapaxes(1, 2) for x in (output, residual))
    return Attended(output.astype(call.query.dtype), residual if call.return_residual else None, None)


def has_mesh() -> bool:
    """Whether the mesh in context divides tokens over devices."""
    return jax.sharding.get_abstract_mesh().shape.get(axes.TOKENS, 1) > 1


def _mesh() -> AbstractMesh:
    mesh = jax.sharding.get_abstract_mesh()
    if axes.TOKENS not in mesh.shape:
        raise NotImplementedError(f'mesh: ring needs one with an axis {axes.TOKENS!r} in context (jax.set_mesh)')
    if not mesh.are_all_axes_auto:
        raise NotImplementedError(f'mesh: ring divides it itself, and its axes are {mesh.axis_types}, not all Auto')
    return mesh


def _refuse(call: Call, size: int) -> None:
    """Raises NotImplementedError for what ring does not serve, with the reason."""
    (T, S), rules = (call.query.shape[1], call.key.shape[1]), call.rules
    for name, is_so, reason in (
        ('query', T % size, f'its {T} tokens do not divide over {size} devices'),
        ('key', S % size, f'its {S} tokens do not divide over {size} devices'),
        ('bias', call.bias is not None, 'ring adds none of an array'),
        ('mask', rules.mask is not None, 'ring takes rules, not arrays'),
        ('return_weights', call.return_weights, 'ring never forms them'),
    ):
        if is_so:
            raise NotImplementedError(f'{name}: {reason}')


def divided(call: Call, mesh: AbstractMesh, platform: str) -> Ring:
    """How the call lies on the devices of the mesh.  Raises NotImplementedError where no tile size fits."""
    (B, T, N, _), (S, K) = call.query.shape, call.key.shape[1:3]
    size, rules = mesh.shape[axes.TOKENS], call.rules
    heads = axes.HEADS if axes.HEADS in mesh.shape and K % mesh.shape[axes.HEADS] == 0 else None  # then N does too
    folded = rules.is_causal and size > 1 and T % (2 * size) == S % (2 * size) == 0
    chunks = size * (2 if folded else 1)
    queries, keys = _blocks(call, T // chunks, S // chunks, N // (mesh.shape[heads] if heads else 1), platform)
    rows = axes.rows(mesh.shape, B)
    several = B > math.prod(mesh.shape[axis] for axis in rows)  # batch rows on a device
    plan = flash.Plan(
        Grid(T // size, S // size, queries, keys), T, rules.is_causal, rules.window, call.logits_soft_cap,
        call.dropout_rate, rules.restrict(), platform != 'cpu' and several,
    )  # fmt: skip
    return Ring(plan, mesh, rows, heads, folded)


def _arrays(call: Call) -> tuple[Arrays, Arrays]:
    """Those that have a gradient, and the others, by the names and with the axes of `LETTERS`."""
    (B, T, N, H), K = call.query.shape, call.key.shape[2]
    wide = jnp.promote_types(call.query.dtype, jnp.float32)
    query = (call.query.astype(wide) * call.scale).swapaxes(1, 2).reshape(B, K, N // K, T, H)
    floats = {'query': query, 'key': call.key.swapaxes(1, 2), 'value': call.value.swapaxes(1, 2)}
    for name, x in (('sinks', call.sinks), ('slopes', call.alibi_slopes)):
        if x is not None:
            floats[name] = x.astype(wide).reshape(K, N // K)
    others = {name: getattr(call.rules, name) for name in LETTERS if getattr(call.rules, name, None) is not None}
    others['number'] = jnp.arange(B)
    if call.dropout_rate and call.dropout_rng is not None:
        others['words'] = dropout.seed(call.dropout_rng)
    return floats, others


def _blocks(call: Call, queries: int, keys: int, N: int, platform: str) -> tuple[int, int]:
    """Sizes of the tiles that chunks of so many queries and keys divide into, none of which spans two chunks."""
    limits = call.block_sizes or blockwise.block_sizes(queries, keys, N, platform)
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
def _attend(ring: Ring, floats: Arrays, others: Arrays) -> tuple[Array, Array]:
    """Output [B, K, G, T, Hv] and the log of each row's sum [B, K, G, T], the largest number where it is empty."""
    return _forward(ring, floats, others)[0]


def _forward(ring: Ring, floats: Arrays, others: Arrays) -> tuple[tuple[Array, Array], tuple]:
    made = _on_each_device(ring, _forward_part, floats | others, ('output', 'total'))
    attended = made['output'], made['total']
    return attended, (floats, others, *attended)


def _backward(ring: Ring, saved: tuple, cotangents: tuple[Array, Array]) -> tuple[Arrays, None]:
    return _gradients(ring, *saved, cotangents[0]), None  # None: the rest has no gradient


def _gradients_once(
    ring: Ring, floats: Arrays, others: Arrays, output: Array, total: Array, cotangent: Array
) -> Arrays:
    arrays = floats | others | {'output': output, 'total': total, 'cotangent': cotangent}
    made = _on_each_device(ring, _backward_part, arrays, tuple(floats))
    return {name: made[name].astype(x.dtype) for name, x in floats.items()}


_gradients = derivatives.once(_gradients_once, 'ring')
_attend.defvjp(_forward, _backward)


# How arrays lie on the devices


def _on_each_device(ring: Ring, function: Any, arrays: Arrays, made: tuple[str, ...]) -> Arrays:
    """`function(ring, arrays)` on each device with its part of every array, tokens in the order of the work."""

    def part(arrays: Arrays) -> Arrays:
        results = function(ring, {name: _turned(ring, name, x, _fold) for name, x in arrays.items()})
        return {name: _turned(ring, name, results[name], _unfold) for name in made}

    # All that is replicated is made the same on every device, in this file: nothing here is left for JAX to check.
    return jax.shard_map(
        part, mesh=ring.mesh, in_specs=({name: _spec(ring, name, x.shape[0]) for name, x in arrays.items()},),
        out_specs={name: _spec(ring, name) for name in made}, check_vma=False,
    )(arrays)  # fmt: skip


def _spec(ring: Ring, name: str, rows: int | None = None) -> PartitionSpec:
    places = {'B': None if rows == 1 else ring.rows, 'K': ring.heads, 'T': axes.TOKENS, 'S': axes.TOKENS}
    return PartitionSpec(*(places.get(letter) for letter in LETTERS[name]))


def _turned(ring: Ring, name: str, x: Array, turn: Any) -> Array:
    tokens = [axis for axis, letter in enumerate(LETTERS[name]) if letter in 'TS']
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
    even, odd = (jax.lax.ppermute(half, axes.TOKENS, _homes(size, i)) for i, half in enumerate(halves))
    return jnp.concatenate(_in_order(even, odd), axis)


def _unfold(x: Array, axis: int, size: int) -> Array:
    """`_fold` undone."""
    halves = _in_order(*jnp.split(x, 2, axis))
    back = [[(there, here) for here, there in _homes(size, i)] for i in range(2)]
    chunks = (jax.lax.ppermute(half, axes.TOKENS, moves) for half, moves in zip(halves, back, strict=True))
    return jnp.concatenate(list(chunks), axis)


def _in_order(one: Array, other: Array) -> list[Array]:
    """Chunk d is even on an even device: (even, odd) chunks as (d, 2 n - 1 - d) and back."""
    even = jax.lax.axis_index(axes.TOKENS) % 2 == 0
    return [jnp.where(even, one, other), jnp.where(even, other, one)]


def starts(ring: Ring, device: Int[Array, ''], length: int, block: int) -> Int[Array, ' blocks']:
    """The row numbers that the blocks of a device's `length` queries or keys begin at."""
    chunks = [device, 2 * ring.size - 1 - device] if ring.folded else [device]
    size = length // len(chunks)
    return jnp.concatenate([chunk * size + jnp.arange(0, size, block) for chunk in chunks])


# What a device does


def local(ring: Ring, arrays: Arrays, device: Int[Array, ''], source: Int[Array, '']) -> Rules:
    """The rules between the queries of one device and the keys of another, with a leading axis B or 1."""
    grid = ring.plan.grid
    return Rules(
        query_starts=starts(ring, device, grid.T, grid.queries)[None],
        key_starts=starts(ring, source, grid.S, grid.keys)[None],
        **{name: arrays.get(name) for name in Rules._fields if not name.endswith('_starts')},
    )


def _inputs(ring: Ring, arrays: Arrays, turn: Int[Array, '']) -> tuple[flash.Floats, flash.Others]:
    """What `flash` is given after so many turns, without the sinks: they count once."""
    device = jax.lax.axis_index(axes.TOKENS)
    number = arrays['number']
    if ring.heads is not None:  # dropout counts heads: b N + n as (b parts + part) (N / parts) + n
        number = number * ring.mesh.shape[ring.heads] + jax.lax.axis_index(ring.heads)
    rules = local(ring, arrays, device, (device - turn) % ring.size)
    floats = flash.Floats(arrays['query'], arrays['key'], arrays['value'], None, None, arrays.get('slopes'))
    return floats, flash.Others(rules, number, arrays.get('words'))


def _parted(arrays: Arrays) -> tuple[Arrays, Arrays]:
    """What stays and what goes round."""
    going = {name: x for name, x in arrays.items() if 'S' in LETTERS[name]}
    return {name: x for name, x in arrays.items() if name not in going}, going


def _pass_on(ring: Ring, tree: Any) -> Any:
    """To the next device, from the one before."""
    moves = [(device, (device + 1) % ring.size) for device in range(ring.size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axes.TOKENS, moves), tree)


def _forward_part(ring: Ring, arrays: Arrays) -> Arrays:
    """Output and the log of the sum of a device's queries."""
    query, value = arrays['query'], arrays['value']
    lowest = jnp.finfo(query.dtype).min
    own, going = _parted(arrays)

    def turn(state: tuple, number: Array) -> tuple[tuple, None]:
        going, output, total = state
        after = _pass_on(ring, going)  # meanwhile; after the last turn all is home again
        more, log, _ = flash.forward(ring.plan, *_inputs(ring, own | going, number))
        return (after, *_merged(output, total, more, log)), None

    nothing = jnp.zeros((*query.shape[:-1], value.shape[-1]), query.dtype), jnp.full(query.shape[:-1], lowest)
    (_, output, total), _ = jax.lax.scan(turn, (going, *nothing), jnp.arange(ring.size))
    empty = total == lowest
    if 'sinks' in arrays:
        log, total = total, jnp.logaddexp(total, arrays['sinks'][None, :, :, None])
        output = output * jnp.exp(log - total)[..., None]
    return {'output': output, 'total': flash.largest_if(empty, total)}


def _merged(output: Array, total: Array, more: Array, log: Array) -> tuple[Array, Array]:
    """Two outputs over different keys, and the logs of their sums, as one over all of the keys."""
    both = jnp.logaddexp(total, log)
    return output * jnp.exp(total - both)[..., None] + more * jnp.exp(log - both)[..., None], both


def _backward_part(ring: Ring, arrays: Arrays) -> Arrays:
    """The gradients of all that has one, of a device's queries and keys."""
    saved = [arrays.pop(name) for name in ('output', 'total', 'cotangent')]
    own, going = _parted(arrays)
    wide = arrays['query'].dtype
    zeros = lambda names: {name: jnp.zeros(arrays[name].shape, wide) for name in names if name in arrays}

    def turn(state: tuple, number: Array) -> tuple[tuple, None]:
        going, travelling, staying = state
        floats, others = _inputs(ring, own | going, number)
        made = flash.gradients(ring.plan, floats, others, *saved)._asdict()
        travelling, staying = ({name: x + made[name] for name, x in sums.items()} for sums in (travelling, staying))
        return (_pass_on(ring, going), _pass_on(ring, travelling), staying), None

    start = going, zeros(('key', 'value')), zeros(('query', 'slopes'))
    (_, travelling, staying), _ = jax.lax.scan(turn, start, jnp.arange(ring.size))
    shared = {'slopes': staying.pop('slopes')} if 'slopes' in staying else {}
    if 'sinks' in arrays:
        shared['sinks'] = flash.to_sinks(arrays['sinks'], *saved)
    return travelling | staying | jax.lax.psum(shared, (*ring.rows, axes.TOKENS))
