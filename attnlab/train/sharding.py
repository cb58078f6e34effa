"""Sharding of parameters and optimizer state over the axes of a device mesh."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from attnlab import parameters
from attnlab.train import checksum

PARAMETER_AXES = ('fsdp', 'tensor', 'expert')
"""Mesh axes over which parameters are sharded."""


def parameter_spec(path: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> PartitionSpec:
    """Return the PartitionSpec of an array on a mesh; an axis whose size is not divisible is not sharded.

    path: path of a parameter, or of an array in the optimizer's state, which ends in that of its parameter.
    shape: shape of the array; a scalar is replicated.
    sizes: size of each mesh axis.

    Raises:
      ValueError: if the path matches no rule of `parameters.PARAMETER_RULES`, or if the array has fewer axes than its
        rule.
    """
    if not shape:
        return PartitionSpec()
    rule = parameters.find_rule(path)
    if rule is None:
        raise ValueError(f'no sharding rule matches {path} {shape}; add one to attnlab.parameters.PARAMETER_RULES')
    if len(rule.axes) > len(shape):
        raise ValueError(f'the sharding rule for {path} has {len(rule.axes)} axes; the array has shape {shape}')
    leading = len(shape) - len(rule.axes)

    def is_sharded(size: int, axis: str | None) -> bool:
        return axis is not None and sizes.get(axis, 1) > 1 and size % sizes[axis] == 0

    axes = [axis if is_sharded(size, axis) else None for size, axis in zip(shape[leading:], rule.axes, strict=True)]
    return PartitionSpec(*[None] * leading, *axes)


def parameter_specs(tree: Any, sizes: Mapping[str, int]) -> Any:
    """Return the `parameter_spec` of every leaf of a tree of arrays or shapes.

    If no mesh axis of `PARAMETER_AXES` is larger than 1, the leaves need no rule.
    """
    if all(sizes.get(axis, 1) == 1 for axis in PARAMETER_AXES):
        return jax.tree.map(lambda x: PartitionSpec(), tree)
    return jax.tree_util.tree_map_with_path(
        lambda keys, x: parameter_spec(checksum.path_string(keys), x.shape, sizes), tree
    )
