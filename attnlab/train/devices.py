"""The devices of a run, and which part of a step lies on which."""

import contextlib
import math
import re
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from attnlab.errors import UserError
from attnlab.kernels.mesh_axes import BATCH_AXES, MESH_AXES, SEQUENCE_AXIS
from attnlab.tasks.task import Batch, Params
from attnlab.train import sharding

T = TypeVar('T')
R = TypeVar('R')

PMAP_AXIS = 'data'
"""The axis of rows that the programs of pmap share."""

MAX_CPU_MESH_DEVICES = 2048
"""CPU devices of one process in XLA, which compiles no program for more of them."""


class Layout(Protocol):
    """How state and batches are divided among devices.

    count: number of devices.
    axis: mapped axis over which a step sums gradients itself; None where the compiler does.
    """

    count: int
    axis: str | None

    def constrain(self, parts: Batch) -> Batch:
        """Divide micro-batches [accumulate, rows, ...] among the devices, inside a compiled step."""
        return parts

    def stored(self, tree: T) -> T:
        """Shapes of a state, with the sharding in which it is made, saved and restored."""
        ...

    def start(self, make: Callable[..., T], *args: Any) -> T:
        """`make(*args)`, a pure function, with its result placed as `stored` describes."""
        places = jax.tree.map(lambda x: x.sharding, self.stored(jax.eval_shape(make, *args)))
        return jax.jit(make, out_shardings=places)(*args)

    def replicate(self, tree: T) -> T:
        """A stored state in the form that compiled steps take."""
        return tree

    def unreplicate(self, tree: T) -> T:
        """A compiled step's state in the form that is stored."""
        return tree

    def compile(self, step: Callable[..., tuple[T, R]], state: T) -> Callable[..., tuple[T, R]]:
        """Compile a pure (state, batch, ...) -> (state, values) for all devices; it donates the state's memory.

        state: shows the sharding. Arguments after the batch are replicated like a state.
        """
        ...

    def rows(self, count: int) -> slice:
        """The rows, of a batch of `count`, that are on devices of this process."""
        return slice(0, count)

    def batch(self, tree: Batch, count: int | None = None) -> Batch:
        """A batch of the host in the form that compiled steps take.

        count: rows of the whole batch, where `tree` holds only the `rows` of this process.
        """
        ...

    def use(self, function: Callable[[Params], T], params: Params) -> T:
        """`function(params)`, where `axes.shard_rows` divides rows over the mesh; pmap: on one device."""
        ...

    def local(self, tree: T) -> T:
        """A state, in either form, or values, whole on one device of this process."""
        ...


def make_layout(parallel: Literal['jit', 'pmap'], mesh: str, rows: int) -> Layout:
    """Of batches, or micro-batches, of so many rows on the devices that a mesh asks for.

    mesh: sizes by axis, as in 'data=2,tensor=4'.  Rows are divided over `data`, `fsdp` and `expert`; parameters and the
    optimizer's state over `fsdp`; heads, hidden activations and the vocabulary over `tensor`; experts over `expert`;
    the tokens of a row over `sequence`.  'data=0' is as many as there are and divide the rows.
    parallel: 'jit' is one program over all devices, with the same noise and the same experts' losses on any number of
    them.  'pmap' is a program a device, each with its rows and the whole state: noise and experts' losses are those of
    its own rows.

    Raises UserError for devices that are not there, and for a number that does not divide the rows.
    """
    found = make_mesh(mesh, rows)
    if parallel == 'jit':
        return JitLayout(found)
    if found.size > found.shape['data'] or jax.process_count() > 1:
        raise UserError(f"train.parallel is 'pmap' and train.mesh {mesh!r}; expected data alone, in one process")
    return PmapLayout(list(found.devices.flat))


def make_evaluation_layout(mesh: str, rows: int) -> Layout:
    """As `make_layout` by jit; where there are fewer devices than the mesh asks for, rows over those that there are."""
    wanted = math.prod(max(size, 1) for size in parse_mesh(mesh).values())
    return JitLayout(make_mesh(mesh if wanted <= len(jax.devices()) else 'data=0', rows))


def make_mesh(text: str, rows: int) -> Mesh:
    """The mesh of `make_layout`, over the first devices there are; errors as there."""
    devices = jax.devices()
    sizes = _filled(parse_mesh(text), rows, len(devices), text)
    count = math.prod(sizes.values())
    if jax.process_count() > 1 and count < len(devices):
        raise UserError(f'train.mesh is {text!r}, {count} devices; expected all {len(devices)} of the processes')
    # Auto: the compiler divides what is not said, as optax and Flax know of no mesh.
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes), devices=devices[:count])


def parse_mesh(mesh: str) -> dict[str, int]:
    """'data=2,tensor=4' as sizes of all axes, 1 where it names none; raises UserError for anything else."""
    sizes, named = {name: 1 for name in MESH_AXES}, set()
    for part in mesh.split(','):
        name, _, size = part.strip().partition('=')
        if name not in MESH_AXES or not re.fullmatch('[0-9]{1,9}', size) or (int(size) < 1 and name != 'data'):
            raise UserError(
                f"train.mesh has {part!r}; expected sizes as in 'data=2,tensor=4', of {', '.join(MESH_AXES)}"
            )
        if name in named:
            raise UserError(f'train.mesh is {mesh!r}; expected a size of {name} once')
        sizes[name], named = int(size), {*named, name}
    return sizes


def count_mesh_devices(mesh: str) -> int:
    """The devices of a mesh that says them all; raises UserError for one that leaves them open."""
    sizes = parse_mesh(mesh)
    if not sizes['data']:
        raise UserError(f'--mesh is {mesh!r}; expected a number of devices for data too')
    if (count := math.prod(sizes.values())) > MAX_CPU_MESH_DEVICES:
        raise UserError(
            f'--mesh is {mesh!r}, {count} devices; expected at most {MAX_CPU_MESH_DEVICES}, as many as XLA compiles for'
        )
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


class JitLayout(Layout):
    """One program over all devices of a mesh; the compiler adds the communication."""

    axis = None

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.count = mesh.size
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._gather = jax.jit(lambda x: x, out_shardings=self._whole)

    def constrain(self, parts: Batch) -> Batch:
        def divided(x: jax.Array) -> jax.Array:
            spec = PartitionSpec(None, *batch_spec(x.shape[1:], self.mesh))
            return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

        return jax.tree.map(divided, parts)

    def stored(self, tree: T) -> T:
        place = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec))
        return jax.tree.map(place, tree, sharding.parameter_specs(tree, self.mesh.shape))

    def compile(self, step: Callable[..., tuple[T, R]], state: T) -> Callable[..., tuple[T, R]]:
        places = jax.tree.map(lambda x: x.sharding, state), self._whole
        run = jax.jit(step, donate_argnums=0, out_shardings=places)

        def in_context(*args: Any) -> tuple[T, R]:
            with self._context():
                return run(*args)

        return in_context

    def rows(self, count: int) -> slice:
        held = NamedSharding(self.mesh, PartitionSpec(BATCH_AXES)).addressable_devices_indices_map((count,)).values()
        spans = [each[0].indices(count) for each in held if each]
        return slice(min(start for start, _, _ in spans), max(stop for _, stop, _ in spans))

    def batch(self, tree: Batch, count: int | None = None) -> Batch:
        first = 0 if count is None else self.rows(count).start

        def send(x: np.ndarray) -> jax.Array:
            shape = x.shape if count is None else (count, *x.shape[1:])

            def part(at: Any) -> np.ndarray:
                start, stop, _ = at[0].indices(shape[0])
                return x[(slice(start - first, stop - first), *at[1:])]

            return jax.make_array_from_callback(shape, NamedSharding(self.mesh, batch_spec(shape, self.mesh)), part)

        return jax.tree.map(send, tree)

    def use(self, function: Callable[[Params], T], params: Params) -> T:
        with self._context():
            return function(params)

    def local(self, tree: T) -> T:
        whole = lambda x: x if x.is_fully_replicated else self._gather(x)
        return jax.tree.map(lambda x: whole(x).addressable_data(0), tree)

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        """The mesh for `axes.shard_rows` and other functions that read it from the context."""
        return jax.set_mesh(self.mesh) if self.count > 1 else contextlib.nullcontext()


class PmapLayout(Layout):
    """A program on each device, with its own rows and the whole state."""

    axis = PMAP_AXIS

    def __init__(self, devices: list[Any]) -> None:
        self.count = len(devices)
        self._devices = devices
        self._copy = jax.pmap(lambda tree, _: tree, in_axes=(None, 0), devices=devices)

    def stored(self, tree: T) -> T:
        here = SingleDeviceSharding(self._devices[0])
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), tree)

    def replicate(self, tree: T) -> T:
        return self._copy(tree, jnp.arange(self.count))

    def unreplicate(self, tree: T) -> T:
        return self.local(tree)

    def compile(self, step: Callable[..., tuple[T, R]], state: T) -> Callable[..., tuple[T, R]]:
        return jax.pmap(step, PMAP_AXIS, donate_argnums=0, devices=self._devices)

    def batch(self, tree: Batch, count: int | None = None) -> Batch:
        return jax.tree.map(lambda x: x.reshape(self.count, -1, *x.shape[1:]), tree)

    def use(self, function: Callable[[Params], T], params: Params) -> T:
        return function(self.local(params))

    def local(self, tree: T) -> T:
        return jax.tree.map(lambda x: x.addressable_data(0)[0], tree)


def batch_spec(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """How an array [B, ...] of a batch is divided: its rows, and over `sequence` what comes next.

    Raises UserError where that does not divide it.
    """
    parts = mesh.shape[SEQUENCE_AXIS]
    if len(shape) < 2 or parts == 1:
        return PartitionSpec(BATCH_AXES)
    if shape[1] % parts:
        raise UserError(
            f'train.mesh has {SEQUENCE_AXIS}={parts}; expected a divisor of the length {shape[1]} of a batch'
        )
    return PartitionSpec(BATCH_AXES, SEQUENCE_AXIS)
