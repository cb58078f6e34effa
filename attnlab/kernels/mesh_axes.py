"""Names of the axes of a device mesh, and functions that divide arrays over them or replicate them."""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Shaped

MESH_AXES: tuple[str, ...] = ('data', 'fsdp', 'expert', 'sequence', 'tensor')
"""All mesh axis names, ordered from least to most communication between the devices of the axis."""

BATCH_AXES = ('data', 'fsdp', 'expert')
"""The mesh axes over which the rows of a batch are divided."""

SEQUENCE_AXIS = 'sequence'
"""The mesh axis over which the tokens of each row are divided."""

EXPERT_AXIS = 'expert'
"""The mesh axis over which the experts of a mixture are divided, besides batch rows."""

TENSOR_AXIS = 'tensor'
"""The mesh axis over which heads, hidden activations and the vocabulary are divided."""


def shard_rows(x: Shaped[Array, 'B ...']) -> Shaped[Array, 'B ...']:
    """Return x with axis 0 (rows) divided over `BATCH_AXES` and axis 1 (such as tokens) over `SEQUENCE_AXIS`.

    Without a mesh in context (`jax.set_mesh`), and inside `jax.shard_map`, x is returned as it is.
    Without this constraint the compiler may gather activations where it should gather parameters.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*(BATCH_AXES, SEQUENCE_AXIS)[: x.ndim]))


def batch_axes_dividing(sizes: Mapping[str, int], B: int) -> tuple[str, ...]:
    """Return the mesh axes that together divide B rows evenly.

    The axes of `BATCH_AXES` are tried in order; one that no longer divides evenly is left out.
    `sizes` has the size of each mesh axis by name.
    """
    dividing, parts = [], 1
    for axis in BATCH_AXES:
        if axis in sizes and B % (parts * sizes[axis]) == 0:
            dividing.append(axis)
            parts *= sizes[axis]
    return tuple(dividing)


def evaluation_batch_size(limit: int, count: int) -> int:
    """Return the evaluation batch size for `count` rows: a multiple of the data-parallel device count.

    The data-parallel devices are those over which the mesh in context divides rows.  The batch has about `limit` rows
    for each memory, and no more rows than `count` needs.  Accelerators have one memory each; all devices of a CPU share
    one.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    parts = math.prod(sizes.get(axis, 1) for axis in BATCH_AXES)
    rows_per_device = max(1, limit // parts) if jax.default_backend() == 'cpu' else limit
    return parts * min(rows_per_device, -(-count // parts))


def replicate_arrays(tree: Any) -> Any:
    """Return the arrays of `tree` replicated on every device of the mesh in context, so that every process can read
    them.

    Without a mesh in context they are returned as they are.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec()), tree)


def match_varying_axes(tree: Any, *like: Any) -> Any:
    """Cast the arrays of `tree` to vary over every mesh axis that any array of `tree` or `like` varies over.

    Under the checks of `jax.shard_map` a loop's carry has one type before and after a step: a constant initial carry
    varies over no axis, and the sum of it and a device's part of an array does.  The values stay the same, and outside
    of `jax.shard_map` nothing is done.
    """
    varying = lambda x: jax.typeof(x).mat.varying
    names = frozenset().union(*map(varying, jax.tree.leaves((tree, like))))

    def cast(x: Array) -> Array:
        missing = tuple(sorted(names - varying(x), key=str))
        return jax.lax.pcast(x, missing, to='varying') if missing else x

    return jax.tree.map(cast, tree)
