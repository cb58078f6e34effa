"""The parameters of all models by their paths: how each is divided over a mesh, and whether its weights decay.

A path is as in 'stack/block_0/attention/query/kernel'. A state of the optimizer has the path of its parameter at its
end. A layer with a new parameter adds a row to `PARAMETER_RULES`.
"""

import re
from typing import Literal, NamedTuple


class ParameterRule(NamedTuple):
    """A kind of parameter.

    pattern: regular expression of the end of the path.
    axes: mesh axis of each of the last axes of the array; axes in front of them, such as the layers of a scan, are not
      divided.
    decayed: whether weight decay applies.
    kind: 'lookup' for embeddings, of which a token reads one row; 'expert' for weights that only some tokens use.
    """

    pattern: str
    axes: tuple[str | None, ...]
    decayed: bool = True
    kind: Literal['', 'lookup', 'expert'] = ''


PARAMETER_RULES = (
    # Attention: [D, N, H], [N, H, D] and their biases.
    ParameterRule(r'(cross_)?attention/(query|key|value)/kernel', ('fsdp', 'tensor', None)),
    ParameterRule(r'(cross_)?attention/(query|key|value)/bias', ('tensor', None), decayed=False),
    ParameterRule(r'(cross_)?attention/out/kernel', ('tensor', None, 'fsdp')),
    ParameterRule(r'attention/sinks', ('tensor',), decayed=False),
    ParameterRule(r'attention/qk_scale', (), decayed=False),
    ParameterRule(r'relative_bias/table', (None, 'tensor')),
    # Experts: [E, D, F] and [E, F, D].
    ParameterRule(r'experts/(up|gate)/kernel', ('expert', 'fsdp', 'tensor'), kind='expert'),
    ParameterRule(r'experts/(up|gate)/bias', ('expert', 'tensor'), decayed=False, kind='expert'),
    ParameterRule(r'experts/down/kernel', ('expert', 'tensor', 'fsdp'), kind='expert'),
    ParameterRule(r'experts/down/bias', ('expert', None), decayed=False, kind='expert'),
    # MLP, and the one beside experts that all tokens go through: [D, F] and [F, D].
    ParameterRule(r'(mlp|shared_expert)/(up|gate)/kernel', ('fsdp', 'tensor')),
    ParameterRule(r'(mlp|shared_expert)/(up|gate)/bias', ('tensor',), decayed=False),
    ParameterRule(r'(mlp|shared_expert)/down/kernel', ('tensor', 'fsdp')),
    # Vocabularies: [V, D] and [D, V]; positions: [T, D].
    ParameterRule(r'(embedding|embed_source|embed_target)/embedding', ('tensor', 'fsdp'), kind='lookup'),
    ParameterRule(r'positions/table', ('fsdp',), kind='lookup'),
    ParameterRule(r'output/kernel', ('fsdp', 'tensor')),
    # Other matrices and convolutions, [..., out].
    ParameterRule(r'(hidden|input|candidate|[ih][ifgo]|start|read)/kernel', ('fsdp',)),
    ParameterRule(r'attend/(query|key)/kernel', ('fsdp',)),
    ParameterRule(r'(router|head|score)/kernel', ('fsdp',)),
    ParameterRule(
        r'(embedding|convolution|stem|\w*_shortcut|\w*_first|\w*_second|\w*convolution_\d+)/kernel', ('fsdp',)
    ),
    ParameterRule(r'attend/vector', ()),
    # Vectors, but for those above.
    ParameterRule(r'class|registers|bias|scale', (), decayed=False),
)
"""The first row that fits counts; only the last one, of all vectors that are not divided, overlaps with others."""

_PATTERNS = [(re.compile(f'(?:.*/)?(?:{row.pattern})'), row) for row in PARAMETER_RULES]
_BLOCK = re.compile(r'(?:stage_(\d+)_)?block_(\d+)')


def find_rule(path: str) -> ParameterRule | None:
    """The row of a parameter; None for a name that no model of the package has."""
    return next((row for pattern, row in _PATTERNS if pattern.fullmatch(path)), None)


def is_decayed(path: str, ndim: int) -> bool:
    """Whether weight decay applies to a parameter of `ndim` axes; outside of the table, to matrices."""
    row = find_rule(path)
    return row.decayed if row else ndim - is_stacked(path) > 1


def is_stacked(path: str) -> bool:
    """Whether the first axis of a parameter is that of the blocks of a scan."""
    return 'blocks' in path.split('/')


def find_block(path: str) -> tuple[int, int] | None:
    """(stage, number) of a parameter's block: block_2 of a Transformer, stage_1_block_2 of a residual network."""
    found = next(filter(None, map(_BLOCK.match, path.split('/'))), None)
    return (int(found[1] or 0), int(found[2])) if found else None


def is_after_blocks(path: str) -> bool:
    """Whether a parameter outside of the blocks comes after them."""
    return not {'stack', 'head', 'pool'}.isdisjoint(path.split('/'))
