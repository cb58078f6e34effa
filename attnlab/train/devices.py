"""The devices of a run, and the division of its state and batches among them."""

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
"""Name of the mapped axis of `PmapLayout`."""

MAX_CPU_MESH_DEVICES = 2048
"""Largest number of CPU devices for which XLA compiles a program in one process."""


class Layout(Protocol):
    """Division of the training state and of batches among devices.

    device_count: number of devices.
    axis: name of the mapped axis over which a step has to sum gradients itself; None if the compiler adds the sums.
    """

    device_count: int
    axis: str | None

    def constrain(self, micro_batches: Batch) -> Batch:
        """Shard micro-batches, arrays [accumulate, rows, ...], over the devices; inside of a compiled step."""
        return micro_batches

    def stored_shapes(self, tree: T) -> T:
        """Return the shapes of a state with the shardings in which the state is created, saved and restored."""
        ...

    def initialize(self, function: Callable[..., T], *args: Any) -> T:
        """Return `function(*args)`, sharded as in `stored_shapes`.  function: a pure function."""
        shardings = jax.tree.map(lambda x: x.sharding, self.stored_shapes(jax.eval_shape(function, *args)))
        return jax.jit(function, out_shardings=shardings)(*args)

    def replicate(self, tree: T) -> T:
        """Convert a stored state to the form that compiled steps take."""
        return tree

    def unreplicate(self, tree: T) -> T:
        """Convert the state of a compiled step to the form that is stored."""
        return tree

    def compile(self, step: Callable[..., tuple[T, R]], state: T) -> Callable[..., tuple[T, R]]:
        """Compile a pure function (state, batch, ...) -> (state, values) for all devices.

        The compiled function donates the memory of the state.

        state: a state with the sharding to use.  Arguments after the batch are replicated like a state.
        """
        ...

    def process_rows(self, count: int) -> slice:
        """Return the rows, of a batch of `count` rows, that are on devices of this process."""
        return slice(0, count)

    def put_batch(self, tree: Batch, count: int | None = None) -> Batch:
        """Copy a batch from the host to the devices, in the form that compiled steps take.

        count: number of rows of the whole batch, if `tree` has only the `process_rows` of this process.
        """
        ...

    def evaluate(self, function: Callable[[Params], T], params: Params) -> T:
        """Return `function(params)`, where `mesh_axes.shard_rows` shards rows over the mesh; pmap: on one device."""
        ...

    def to_local(self, tree: T) -> T:
        """Return a state, in either form, or values, with each array complete on one device of this process."""
        ...


def make_layout(parallel: Literal['jit', 'pmap'], mesh: str, rows: int) -> Layout:
    """Return the layout of batches, or micro-batches, of `rows` rows on the devices of a mesh.

    mesh: size of each axis, as in 'data=2,tensor=4'.  Rows are divided over `data`, `fsdp` and `expert`; parameters and
      the optimizer's state over `fsdp`; heads, hidden activations and the vocabulary over `tensor`; experts over
      `expert`; the tokens of a row over `sequence`.  'data=0' takes as many devices as exist and divide the rows.
    parallel: 'jit' is one program over all devices; noise and the auxiliary losses of experts are the same for any
      number of devices.  'pmap' is one program for each device, which has its own rows and the whole state; noise and
      the auxiliary losses of experts depend on these rows.

    Raises UserError if the devices do not exist, or if their number does not divide the rows.
    """
    device_mesh = make_mesh(mesh, rows)
    if parallel == 'jit':
        return JitLayout(device_mesh)
    if device_mesh.size > device_mesh.shape['data'] or jax.process_count() > 1:
        raise UserError(f"train.parallel is 'pmap' and train.mesh {mesh!r}; expected data alone, in one process")
    return PmapLayout(list(device_mesh.devices.flat))


def make_evaluation_layout(mesh: str, rows: int) -> Layout:
    """Return the jit layout of a mesh; if it has more devices than exist, a layout that divides rows over those."""
    count = math.prod(max(size, 1) for size in parse_mesh(mesh).values())
    return JitLayout(make_mesh(mesh if count <= len(jax.devices()) else 'data=0', rows))


def make_mesh(mesh: str, rows: int) -> Mesh:
    """Return the mesh of `make_layout`, over the first of the existing devices; it raises the same errors."""
    devices = jax.devices()
    sizes = _resolve_data_size(parse_mesh(mesh), rows, len(devices), mesh)
    count = math.prod(sizes.values())
    if jax.process_count() > 1 and count < len(devices):
        raise UserError(f'train.mesh is {mesh!r}, {count} devices; expected all {len(devices)} of the processes')
    # Auto axes: the compiler chooses the shardings that are not given; optax and Flax do not use meshes.
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes), devices=devices[:count])


def parse_mesh(mesh: str) -> dict[str, int]:
    """Return the sizes of all axes for a text such as 'data=2,tensor=4'; 1 for axes that it does not name.

    Raises UserError for text in another format.
    """
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
    """Return the number of devices of a mesh.

    Raises UserError if the mesh leaves the size of `data` open, or has more than `MAX_CPU_MESH_DEVICES` devices.
    """
    sizes = parse_mesh(mesh)
    if not sizes['data']:
        raise UserError(f'--mesh is {mesh!r}; expected a number of devices for data too')
    if (count := math.prod(sizes.values())) > MAX_CPU_MESH_DEVICES:
        raise UserError(
            f'--mesh is {mesh!r}, {count} devices; expected at most {MAX_CPU_MESH_DEVICES}, as many as XLA compiles for'
        )
    return count


def _resolve_data_size(sizes: dict[str, int], rows: int, available: int, mesh: str) -> dict[str, int]:
    """Return the sizes with `data` as large as the available devices and the rows allow, if it is 0.

    mesh: the text of the mesh, for error messages.
    """
    others = math.prod(size for name, size in sizes.items() if name != 'data')
    other_row_parts = sizes['fsdp'] * sizes['expert']
    if not sizes['data']:
        divisors = [n for n in range(1, available // others + 1) if rows % (n * other_row_parts) == 0]
        sizes = sizes | {'data': max(divisors, default=1)}
    if others * sizes['data'] > available:
        raise UserError(f'train.mesh is {mesh!r}, {others * sizes["data"]} devices; there are {available}')
    if rows % (row_parts := sizes['data'] * other_row_parts):
        expected = f'a divisor of the {rows} rows of a (micro-)batch'
        raise UserError(f'train.mesh is {mesh!r}, rows in {row_parts}; expected {expected}')
    return sizes


class JitLayout(Layout):
    """One program over all devices of a mesh; the compiler adds the communication."""

    axis = None

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.device_count = mesh.size
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._gather = jax.jit(lambda x: x, out_shardings=self._replicated)

    def constrain(self, micro_batches: Batch) -> Batch:
        def shard(x: jax.Array) -> jax.Array:
            spec = PartitionSpec(None, *batch_spec(x.shape[1:], self.mesh))
            return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

        return jax.tree.map(shard, micro_batches)

    def stored_shapes(self, tree: T) -> T:
        def with_sharding(x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec))

        return jax.tree.map(with_sharding, tree, sharding.parameter_specs(tree, self.mesh.shape))

    def compile(self, step: Callable[..., tuple[T, R]], state: T) -> Callable[..., tuple[T, R]]:
        shardings = jax.tree.map(lambda x: x.sharding, state), self._replicated
        compiled = jax.jit(step, donate_argnums=0, out_shardings=shardings)

        def run_in_context(*args: Any) -> tuple[T, R]:
            with self._mesh_context():
                return compiled(*args)

        return run_in_context

    def process_rows(self, count: int) -> slice:
        row_sharding = NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))
        indices = row_sharding.addressable_devices_indices_map((count,)).values()
        spans = [index[0].indices(count) for index in indices if index]
        return slice(min(start for start, _, _ in spans), max(stop for _, stop, _ in spans))

    def put_batch(self, tree: Batch, count: int | None = None) -> Batch:
        first_row = 0 if count is None else self.process_rows(count).start

        def put(x: np.ndarray) -> jax.Array:
            shape = x.shape if count is None else (count, *x.shape[1:])

            def shard(index: Any) -> np.ndarray:
                start, stop, _ = index[0].indices(shape[0])
                return x[(slice(start - first_row, stop - first_row), *index[1:])]

            return jax.make_array_from_callback(shape, NamedSharding(self.mesh, batch_spec(shape, self.mesh)), shard)

        return jax.tree.map(put, tree)

    def evaluate(self, function: Callable[[Params], T], params: Params) -> T:
        with self._mesh_context():
            return function(params)

    def to_local(self, tree: T) -> T:
        replicate = lambda x: x if x.is_fully_replicated else self._gather(x)
        return jax.tree.map(lambda x: replicate(x).addressable_data(0), tree)

    def _mesh_context(self) -> contextlib.AbstractContextManager[Any]:
        """Set the mesh for `mesh_axes.shard_rows` and other functions that read it from the context."""
        return jax.set_mesh(self.mesh) if self.device_count > 1 else contextlib.nullcontext()


class PmapLayout(Layout):
    """One program for each device, which has its own rows and the whole state."""

    axis = PMAP_AXIS

    def __init__(self, devices: list[Any]) -> None:
        self.device_count = len(devices)
        self._devices = devices
        self._copy_to_all = jax.pmap(lambda tree, _: tree, in_axes=(None, 0), devices=devices)

    def stored_shapes(self, tree: T) -> T:
        first_device = SingleDeviceSharding(self._devices[0])
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=first_device), tree)

    def replicate(self, tree: T) -> T:
        return self._copy_to_all(tree, jnp.arange(self.device_count))

    def unreplicate(self, tree: T) -> T:
        return self.to_local(tree)

    def compile(self, step: Callable[..., tuple[T, R]], state: T) -> Callable[..., tuple[T, R]]:
        return jax.pmap(step, PMAP_AXIS, donate_argnums=0, devices=self._devices)

    def put_batch(self, tree: Batch, count: int | None = None) -> Batch:
        return jax.tree.map(lambda x: x.reshape(self.device_count, -1, *x.shape[1:]), tree)

    def evaluate(self, function: Callable[[Params], T], params: Params) -> T:
        return function(self.to_local(params))

    def to_local(self, tree: T) -> T:
        return jax.tree.map(lambda x: x.addressable_data(0)[0], tree)


def batch_spec(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Return the PartitionSpec of an array [B, ...] of a batch: B over the batch axes, the next axis over `sequence`.

    Raises UserError if `sequence` does not divide that axis.
    """
    parts = mesh.shape[SEQUENCE_AXIS]
    if len(shape) < 2 or parts == 1:
        return PartitionSpec(BATCH_AXES)
    if shape[1] % parts:
        raise UserError(
            f'train.mesh has {SEQUENCE_AXIS}={parts}; expected a divisor of the length {shape[1]} of a batch'
        )
    return PartitionSpec(BATCH_AXES, SEQUENCE_AXIS)
