"""Which part of each parameter is on which device of a mesh."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from attnlab import parameters
from attnlab.train import checksum

PARAMETER_AXES = ('fsdp', 'tensor', 'expert')
"""Mesh axes that divide parameters."""


def parameter_spec(path: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> PartitionSpec:
    """How an array of that path and shape lies on a mesh of these sizes; an axis that they do not divide stays whole.

    A state of the optimizer has the path and the shape of its parameter at its end; a single number is whole.

    Raises:
      ValueError: for a path that is not in `parameters.PARAMETER_RULES`, and for an array with fewer axes than its row.
    """
    if not shape:
        return PartitionSpec()
    row = parameters.find_rule(path)
    if row is None:
        raise ValueError(f'no rule says how to divide {path} {shape}; add one to attnlab.parameters.PARAMETER_RULES')
    if len(row.axes) > len(shape):
        raise ValueError(f'the rule for {path} has {len(row.axes)} axes; the array has shape {shape}')
    lead = len(shape) - len(row.axes)
    fits = lambda size, name: name is not None and sizes.get(name, 1) > 1 and size % sizes[name] == 0
    parts = (name if fits(size, name) else None for size, name in zip(shape[lead:], row.axes, strict=True))
    return PartitionSpec(*[None] * lead, *parts)


def parameter_specs(tree: Any, sizes: Mapping[str, int]) -> Any:
    """`parameter_spec` for every leaf of a tree of arrays or shapes; any path will do where the mesh divides nothing."""
    if all(sizes.get(name, 1) == 1 for name in PARAMETER_AXES):
        return jax.tree.map(lambda x: PartitionSpec(), tree)
    return jax.tree_util.tree_map_with_path(
        lambda keys, x: parameter_spec(checksum.path_string(keys), x.shape, sizes), tree
    )
