"""Rules for the parameters of all models, by path: their sharding over a device mesh and their weight decay.

A path is the '/'-separated name of a parameter, such as 'stack/block_0/attention/query/kernel'.  The path of an array
in the optimizer's state ends in the path of its parameter.  A layer that adds a parameter adds a rule to
`PARAMETER_RULES`.
"""

import re
from typing import Literal, NamedTuple


class ParameterRule(NamedTuple):
    """Properties of all parameters whose path ends in a pattern.

    pattern: regular expression of the end of the path.
    axes: the mesh axis that each of the last axes of the array is sharded over, None for no sharding.  Axes of the
      array before those, such as the layers of a scan, are not sharded.
    decayed: whether weight decay applies.
    kind: 'embedding' for tables of which a token reads one row; 'expert' for weights that only some tokens use.
    """

    pattern: str
    axes: tuple[str | None, ...]
    decayed: bool = True
    kind: Literal['', 'embedding', 'expert'] = ''


PARAMETER_RULES = (
    # Attention: [D, N, H], [N, H, D] and their biases.
    ParameterRule(r'(cross_)?attention/(query|key|value)/kernel', ('fsdp', 'tensor', None)),
    ParameterRule(r'(cross_)?attention/(query|key|value)/bias', ('tensor', None), decayed=False),
    ParameterRule(r'(cross_)?attention/out/kernel', ('tensor', None, 'fsdp')),
    ParameterRule(r'attention/sinks', ('tensor',), decayed=False),
    ParameterRule(r'attention/qk_scale', (), decayed=False),
    ParameterRule(r'relative_bias/table', (None, 'tensor')),
    # Mixture of experts: [E, D, F] and [E, F, D].
    ParameterRule(r'experts/(up|gate)/kernel', ('expert', 'fsdp', 'tensor'), kind='expert'),
    ParameterRule(r'experts/(up|gate)/bias', ('expert', 'tensor'), decayed=False, kind='expert'),
    ParameterRule(r'experts/down/kernel', ('expert', 'tensor', 'fsdp'), kind='expert'),
    ParameterRule(r'experts/down/bias', ('expert', None), decayed=False, kind='expert'),
    # MLP, and the shared expert, which all tokens pass through: [D, F] and [F, D].
    ParameterRule(r'(mlp|shared_expert)/(up|gate)/kernel', ('fsdp', 'tensor')),
    ParameterRule(r'(mlp|shared_expert)/(up|gate)/bias', ('tensor',), decayed=False),
    ParameterRule(r'(mlp|shared_expert)/down/kernel', ('tensor', 'fsdp')),
    # Token embeddings and output layers: [V, D] and [D, V]; position embeddings: [T, D].
    ParameterRule(r'(embedding|embed_source|embed_target)/embedding', ('tensor', 'fsdp'), kind='embedding'),
    ParameterRule(r'positions/table', ('fsdp',), kind='embedding'),
    ParameterRule(r'output/kernel', ('fsdp', 'tensor')),
    # Other matrices and convolution kernels, [..., out].
    ParameterRule(r'(hidden|input|candidate|[ih][ifgo]|start|read)/kernel', ('fsdp',)),
    ParameterRule(r'attend/(query|key)/kernel', ('fsdp',)),
    ParameterRule(r'(router|head|score)/kernel', ('fsdp',)),
    ParameterRule(
        r'(embedding|convolution|stem|\w*_shortcut|\w*_first|\w*_second|\w*convolution_\d+)/kernel', ('fsdp',)
    ),
    ParameterRule(r'attend/vector', ()),
    # All other vectors.
    ParameterRule(r'class|registers|bias|scale', (), decayed=False),
)
"""The first rule whose pattern matches applies.  Only the last, for unsharded vectors, overlaps with others."""

_PATTERNS = [(re.compile(f'(?:.*/)?(?:{rule.pattern})'), rule) for rule in PARAMETER_RULES]
_BLOCK = re.compile(r'(?:stage_(\d+)_)?block_(\d+)')


def find_rule(path: str) -> ParameterRule | None:
    """Return the rule of a parameter; None for a path that no model of this package has."""
    return next((rule for pattern, rule in _PATTERNS if pattern.fullmatch(path)), None)


def is_decayed(path: str, ndim: int) -> bool:
    """Return whether weight decay applies to a parameter with `ndim` axes; without a rule it applies to matrices."""
    rule = find_rule(path)
    return rule.decayed if rule else ndim - is_stacked(path) > 1


def is_stacked(path: str) -> bool:
    """Return whether the first axis of a parameter is the layer axis of a scan over blocks."""
    return 'blocks' in path.split('/')


def find_block(path: str) -> tuple[int, int] | None:
    """Return (stage, number) of the block that a parameter belongs to; None if it is outside of the blocks.

    'block_2' of a Transformer is (0, 2), 'stage_1_block_2' of a ResNet (1, 2).
    """
    match = next(filter(None, map(_BLOCK.match, path.split('/'))), None)
    return (int(match[1] or 0), int(match[2])) if match else None


def is_after_blocks(path: str) -> bool:
    """Return whether a parameter outside of the blocks belongs to a layer after them."""
    return not {'stack', 'head', 'pool'}.isdisjoint(path.split('/'))
