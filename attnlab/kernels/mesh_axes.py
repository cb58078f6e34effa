"""The axes of a mesh of devices by name, and what of an array is divided over which."""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Shaped

MESH_AXES: tuple[str, ...] = ('data', 'fsdp', 'expert', 'sequence', 'tensor')
"""All that a mesh may have, those first between whose devices the least is sent."""

BATCH_AXES = ('data', 'fsdp', 'expert')
"""Over these the rows of a batch are divided."""

SEQUENCE_AXIS = 'sequence'
"""Over this the tokens of each row."""

EXPERT_AXIS = 'expert'
"""Over this also the experts of a mixture."""

TENSOR_AXIS = 'tensor'
"""Over this heads, hidden activations and the vocabulary."""


def shard_rows(x: Shaped[Array, 'B ...']) -> Shaped[Array, 'B ...']:
    """x as it is, where a mesh is in context (`jax.set_mesh`) divided as a batch is: rows, and what comes next, such as
    tokens.

    Without it the compiler may gather activations where it should gather parameters.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*(BATCH_AXES, SEQUENCE_AXIS)[: x.ndim]))


def batch_axes_dividing(sizes: Mapping[str, int], B: int) -> tuple[str, ...]:
    """The axes of a mesh that divide B rows evenly: each of `BATCH_AXES` that still does."""
    kept, parts = [], 1
    for axis in BATCH_AXES:
        if axis in sizes and B % (parts * sizes[axis]) == 0:
            kept.append(axis)
            parts *= sizes[axis]
    return tuple(kept)


def evaluation_batch_size(limit: int, count: int) -> int:
    """Of `count` rows to run, how many at once: a multiple of the devices that the mesh in context divides rows over,
    about `limit` in one memory, which the devices of a CPU share, and no more than there is need of."""
    sizes = jax.sharding.get_abstract_mesh().shape
    parts = math.prod(sizes.get(axis, 1) for axis in BATCH_AXES)
    each = max(1, limit // parts) if jax.default_backend() == 'cpu' else limit
    return parts * min(each, -(-count // parts))


def replicate_arrays(tree: Any) -> Any:
    """Arrays as they are, on each device of the mesh in context all of them, so that every process can read them."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec()), tree)


def match_varying_axes(tree: Any, *like: Any) -> Any:
    """Cast the arrays of `tree` to vary over every mesh axis that any array of `tree` or `like` varies over.

    Under the checks of `jax.shard_map` a loop's carry has one type before and after a step: a constant start varies
    over no axis, and the sum of it and a device's part of an array does.  The values are the same, and outside of
    `jax.shard_map` nothing is done.
    """
    varying = lambda x: jax.typeof(x).mat.varying
    names = frozenset().union(*map(varying, jax.tree.leaves((tree, like))))

    def cast(x: Array) -> Array:
        missing = tuple(sorted(names - varying(x), key=str))
        return jax.lax.pcast(x, missing, to='varying') if missing else x

    return jax.tree.map(cast, tree)
