"""The devices of a run, and which part of a step lies on which."""

import contextlib
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from attnlab.errors import UserError
from attnlab.kernels.axes import AXES, ROWS, TOKENS
from attnlab.train import sharding

AXIS = 'data'
"""The axis of rows that the programs of pmap share."""

MOST = 2048
"""CPU devices of one process in XLA, which compiles no program for more of them."""


class Layout(NamedTuple):
    """How state and batches are divided among devices.

    count: how many devices.
    axis: over which a step adds up gradients and sums by itself; None where the compiler sees to it.
    constrain: of micro-batches [accumulate, rows, ...] inside a step, says which device has which rows.
    stored: of a state's shapes, with the sharding that it has when it is made, saved and restored.
    start: a state so placed, from what makes one, pure, and its arguments.
    state: as `compile`d steps take it, from one so placed.  kept: the way back.
    compile: (state, batch, ...) -> (state, values), pure, as it runs on all devices, taking over the state's memory;
      and a state to show how it lies.  What follows the batch lies as a state does.
    rows: of a batch of so many, those that lie on devices of this process.
    batch: arrays of the host, the whole batch, as compiled steps take them; or its `rows` alone, and how many it has.
    use: (function, parameters of a state) -> what the function makes of them, called with the mesh in context, so that
      it divides its rows by `axes.spread`; by pmap, on one device.
    local: state, what was kept of it, or values, as one device of this process has it, whole.
    """

    count: int
    axis: str | None
    constrain: Callable[[Any], Any]
    stored: Callable[[Any], Any]
    start: Callable[..., Any]
    state: Callable[[Any], Any]
    kept: Callable[[Any], Any]
    compile: Callable[[Callable[..., Any], Any], Callable[..., Any]]
    rows: Callable[[int], slice]
    batch: Callable[..., Any]
    use: Callable[[Callable[[Any], Any], Any], Any]
    local: Callable[[Any], Any]


def layout(parallel: str, mesh: str, rows: int) -> Layout:
    """Of batches, or micro-batches, of so many rows on the devices that a mesh asks for.

    mesh: sizes by axis, as in 'data=2,tensor=4'.  Rows are divided over `data`, `fsdp` and `expert`; parameters and the
    optimizer's state over `fsdp`; heads, hidden activations and the vocabulary over `tensor`; experts over `expert`;
    the tokens of a row over `sequence`.  'data=0' is as many as there are and divide the rows.
    parallel: 'jit' is one program over all devices, with the same noise and the same experts' losses on any number of
    them.  'pmap' is a program a device, each with its rows and the whole state: noise and experts' losses are those of
    its own rows.

    Raises UserError for devices that are not there, and for a number that does not divide the rows.
    """
    match parallel:
        case 'jit':
            return _jit(mesh_of(mesh, rows))
        case 'pmap':
            found = mesh_of(mesh, rows)
            if found.size > found.shape['data'] or jax.process_count() > 1:
                wanted = 'data alone, in one process'
                raise UserError(f"train.parallel is 'pmap' and train.mesh {mesh!r}; expected {wanted}")
            return _pmap(list(found.devices.flat))
        case other:
            raise UserError(f"train.parallel is {other!r}; expected 'jit' or 'pmap'")


def to_use(mesh: str, rows: int) -> Layout:
    """As `layout` by jit; where there are fewer devices than the mesh asks for, rows over those that there are."""
    wanted = math.prod(max(size, 1) for size in sizes_of(mesh).values())
    return _jit(mesh_of(mesh if wanted <= len(jax.devices()) else 'data=0', rows))


def mesh_of(text: str, rows: int) -> Mesh:
    """The mesh that `layout` speaks of, over the first devices there are; errors as there."""
    devices = jax.devices()
    sizes = _filled(sizes_of(text), rows, len(devices), text)
    count = math.prod(sizes.values())
    if jax.process_count() > 1 and count < len(devices):
        raise UserError(f'train.mesh is {text!r}, {count} devices; expected all {len(devices)} of the processes')
    # Auto: the compiler divides what is not said, as optax and Flax know of no mesh.
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes), devices=devices[:count])


def sizes_of(mesh: str) -> dict[str, int]:
    """'data=2,tensor=4' as sizes of all axes, 1 where it names none; raises UserError for anything else."""
    sizes, named = {name: 1 for name in AXES}, set()
    for part in mesh.split(','):
        name, _, size = part.strip().partition('=')
        if name not in AXES or not re.fullmatch('[0-9]{1,9}', size) or (int(size) < 1 and name != 'data'):
            raise UserError(f"train.mesh has {part!r}; expected sizes as in 'data=2,tensor=4', of {', '.join(AXES)}")
        if name in named:
            raise UserError(f'train.mesh is {mesh!r}; expected a size of {name} once')
        sizes[name], named = int(size), {*named, name}
    return sizes


def number_of(mesh: str) -> int:
    """The devices of a mesh that says them all; raises UserError for one that leaves them open."""
    sizes = sizes_of(mesh)
    if not sizes['data']:
        raise UserError(f'--mesh is {mesh!r}; expected a number of devices for data too')
    if (count := math.prod(sizes.values())) > MOST:
        raise UserError(f'--mesh is {mesh!r}, {count} devices; expected at most {MOST}, as many as XLA compiles for')
    return count


def _filled(sizes: dict[str, int], rows: int, available: int, mesh: str) -> dict[str, int]:
    """The sizes with as many `data` as there are devices for, where that is 0."""
    others = math.prod(size for name, size in sizes.items() if name != 'data')
    shared = sizes['fsdp'] * sizes['expert']
    if not sizes['data']:
        fitting = [n for n in range(1, available // others + 1) if rows % (n * shared) == 0]
        sizes = sizes | {'data': max(fitting, default=1)}
    if others * sizes['data'] > available:
        raise UserError(f'train.mesh is {mesh!r}, {others * sizes["data"]} devices; there are {available}')
    if rows % (parts := sizes['data'] * shared):
        wanted = f'a divisor of the {rows} rows of a (micro-)batch'
        raise UserError(f'train.mesh is {mesh!r}, rows in {parts}; expected {wanted}')
    return sizes


def _jit(mesh: Mesh) -> Layout:
    everywhere = NamedSharding(mesh, PartitionSpec())
    context = lambda: jax.set_mesh(mesh) if mesh.size > 1 else contextlib.nullcontext()

    def start(make: Callable[..., Any], *args: Any) -> Any:
        placed = stored(jax.eval_shape(make, *args), mesh)
        return jax.jit(make, out_shardings=jax.tree.map(lambda x: x.sharding, placed))(*args)

    def compiled(step: Callable[..., Any], state: Any) -> Callable[..., Any]:
        shardings = jax.tree.map(lambda x: x.sharding, state), everywhere
        run = jax.jit(step, donate_argnums=0, out_shardings=shardings)

        def in_context(*args: Any) -> Any:
            with context():  # for `axes.spread` and what else asks for it
                return run(*args)

        return in_context

    def rows(count: int) -> slice:
        held = NamedSharding(mesh, PartitionSpec(ROWS)).addressable_devices_indices_map((count,)).values()
        spans = [each[0].indices(count) for each in held if each]
        return slice(min(start for start, _, _ in spans), max(stop for _, stop, _ in spans))

    def sent(x: Any, count: int | None) -> jax.Array:
        shape = x.shape if count is None else (count, *x.shape[1:])
        first = 0 if count is None else rows(count).start

        def part(at: Any) -> Any:
            start, stop, _ = at[0].indices(shape[0])
            return x[(slice(start - first, stop - first), *at[1:])]

        return jax.make_array_from_callback(shape, NamedSharding(mesh, batch_spec(shape, mesh)), part)

    def use(function: Callable[[Any], Any], params: Any) -> Any:
        with context():
            return function(params)

    gather = jax.jit(lambda x: x, out_shardings=everywhere)

    def local(tree: Any) -> Any:
        whole = lambda x: x if x.is_fully_replicated else gather(x)
        return jax.tree.map(lambda x: whole(x).addressable_data(0), tree)

    return Layout(
        count=mesh.size,
        axis=None,
        constrain=lambda parts: jax.tree.map(
            lambda x: jax.lax.with_sharding_constraint(
                x, NamedSharding(mesh, PartitionSpec(None, *batch_spec(x.shape[1:], mesh)))
            ),
            parts,
        ),
        stored=lambda tree: stored(tree, mesh),
        start=start,
        state=lambda tree: tree,
        kept=lambda tree: tree,
        compile=compiled,
        rows=rows,
        batch=lambda tree, count=None: jax.tree.map(lambda x: sent(x, count), tree),
        use=use,
        local=local,
    )


def stored(tree: Any, mesh: Mesh) -> Any:
    """The shapes of a state with the places that rules give it on a mesh."""
    where = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    return jax.tree.map(where, tree, sharding.specs(tree, mesh.shape))


def batch_spec(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """How an array [B, ...] of a batch is divided: its rows, and over `sequence` what comes next.

    Raises UserError where that does not divide it.
    """
    parts = mesh.shape[TOKENS]
    if len(shape) < 2 or parts == 1:
        return PartitionSpec(ROWS)
    if shape[1] % parts:
        raise UserError(f'train.mesh has {TOKENS}={parts}; expected a divisor of the length {shape[1]} of a batch')
    return PartitionSpec(ROWS, TOKENS)


def _pmap(devices: list[Any]) -> Layout:
    n = len(devices)
    copies = jax.pmap(lambda tree, _: tree, in_axes=(None, 0), devices=devices)
    here = SingleDeviceSharding(devices[0])
    local = lambda tree: jax.tree.map(lambda x: x.addressable_data(0)[0], tree)
    return Layout(
        count=n,
        axis=AXIS,
        constrain=lambda parts: parts,
        stored=lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), tree),
        start=lambda make, *args: jax.jit(make)(*args),
        state=lambda tree: copies(tree, jnp.arange(n)),
        kept=local,
        compile=lambda step, _: jax.pmap(step, AXIS, donate_argnums=0, devices=devices),
        rows=lambda count: slice(0, count),
        batch=lambda tree, count=None: jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]), tree),
        use=lambda function, params: function(local(params)),
        local=local,
    )
