"""Which part of each parameter lies on which device of a mesh: rules of (path, axes)."""

import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from attnlab.train import checksum

RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    # Attention: [D, N, H], [N, H, D] and their biases.
    (r'(cross_)?attention/(query|key|value)/kernel', ('fsdp', 'tensor', None)),
    (r'(cross_)?attention/(query|key|value)/bias', ('tensor', None)),
    (r'(cross_)?attention/out/kernel', ('tensor', None, 'fsdp')),
    (r'attention/sinks', ('tensor',)),
    (r'relative_bias/table', (None, 'tensor')),
    # Experts [E, D, F] and [E, F, D]; an MLP, and the one that all tokens go through beside experts.
    (r'experts/(up|gate)/kernel', ('expert', 'fsdp', 'tensor')),
    (r'experts/(up|gate)/bias', ('expert', 'tensor')),
    (r'experts/down/kernel', ('expert', 'tensor', 'fsdp')),
    (r'experts/down/bias', ('expert', None)),
    (r'(mlp|shared_expert)/(up|gate)/kernel', ('fsdp', 'tensor')),
    (r'(mlp|shared_expert)/(up|gate)/bias', ('tensor',)),
    (r'(mlp|shared_expert)/down/kernel', ('tensor', 'fsdp')),
    # Vocabularies [V, D] and [D, V].
    (r'(embedding|embed_source|embed_target)/embedding', ('tensor', 'fsdp')),
    (r'output/kernel', ('fsdp', 'tensor')),
    # Other matrices and convolutions, [.., out]: recurrent cells, additive attention, routers, readouts, images.
    (r'(hidden|input|candidate|[ih][ifgo]|start|read|router|head|score|query|key)/kernel', ('fsdp',)),
    (r'(embedding|convolution|stem|\w*_shortcut|\w*_first|\w*_second|\w*convolution_\d+)/kernel', ('fsdp',)),
    (r'positions/table', ('fsdp',)),
    # Vectors are whole on every device.
    (r'bias|scale|vector|class|registers', ()),
)
"""Of the first pattern that the end of a parameter's path fits: over which axes of the mesh its last axes are divided.
Axes in front of them, such as the layers of a scan, stay whole."""

DIVIDING = ('fsdp', 'tensor', 'expert')
"""The axes that rules name."""


def divided(path: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> PartitionSpec:
    """How an array of that path and shape lies on a mesh of these sizes; an axis that they do not divide stays whole.

    A state of the optimizer has the path and the shape of its parameter at its end; a single number is whole.

    Raises:
      ValueError: for a path that no rule covers, and for an array with fewer axes than its rule.
    """
    if not shape:
        return PartitionSpec()
    names = next((names for pattern, names in RULES if re.fullmatch(f'(.*/)?({pattern})', path)), None)
    if names is None:
        raise ValueError(f'no rule says how to divide {path} {shape}; add one to attnlab.train.sharding.RULES')
    if len(names) > len(shape):
        raise ValueError(f'the rule for {path} has {len(names)} axes; the array has shape {shape}')
    lead = len(shape) - len(names)
    fits = lambda size, name: name is not None and sizes.get(name, 1) > 1 and size % sizes[name] == 0
    parts = (name if fits(size, name) else None for size, name in zip(shape[lead:], names, strict=True))
    return PartitionSpec(*[None] * lead, *parts)


def specs(tree: Any, sizes: Mapping[str, int]) -> Any:
    """`divided` for every leaf of a tree of arrays or shapes; no rule is asked where nothing is to be divided."""
    if all(sizes.get(name, 1) == 1 for name in DIVIDING):
        return jax.tree.map(lambda x: PartitionSpec(), tree)
    return jax.tree_util.tree_map_with_path(lambda keys, x: divided(checksum.path(keys), x.shape, sizes), tree)
