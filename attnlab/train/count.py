"""What a config costs, from shapes alone: parameters, floating-point operations, activations, key-value cache."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from attnlab import parameters, tasks
from attnlab.configs import BlockConfig, RunConfig
from attnlab.tasks.task import Outline, SupportsOutline, require_support
from attnlab.train import checksum
from attnlab.train.cost import (
    compiler_flops,
    format_bytes,
    gradient_flops,
    product_flops,
    saved_bytes,
    tree_bytes,
    tree_size,
)


class CostRow(NamedTuple):
    """A quantity: of one layer, of what is in none, and of the whole.

    The first two are None where layers are not alike, and all three where it cannot be computed.
    """

    name: str
    layer: float | None
    rest: float | None
    whole: float | None
    unit: str


def count_costs(config: RunConfig | ConfigDict) -> tuple[str, list[CostRow]]:
    """What one row of a batch is, in words, and the rows of `attnlab count`; nothing is allocated.

    Operations are those of products, two for each multiplication; attention counts all pairs, also those that a mask
    rules out, and experts the active ones.  The compiler's own count has everything else in it, additions, norms and
    the like; it is that of one and of two layers in a loop, drawn out to all, as XLA counts a scan's body once,
    and is left empty where an array has 2^63 elements or more, of which XLA has no account.
    Activations are what the forward pass keeps for the backward pass; the compiler may keep less.
    """
    task = tasks.create_task(config)
    of = require_support(task, SupportsOutline, 'have a model that can be counted').outline
    whole, dense = of(None, False), of(None, True)
    model = getattr(task.config, 'model', None)
    blocks = model if isinstance(model, BlockConfig) else None
    layered, experts = (blocks.layers, blocks.experts) if blocks else (0, 0)
    ones = [(of(layers, False), of(layers, True)) for layers in (1, 2)] if layered else []

    def row(name: str, unit: str, value: Callable[[Outline, int], float], active: bool = False) -> CostRow:
        total = value(dense if active else whole, layered)
        if not layered:
            return CostRow(name, None, None, total, unit)
        one, two = (value(each[active], layers) for layers, each in enumerate(ones, 1))
        return CostRow(name, two - one, 2 * one - two, total, unit)

    share = blocks.active / experts if blocks and experts else 1.0
    rows = [
        row('parameters', '', lambda each, _: tree_size(each.params)),
        row('  without embeddings', '', lambda each, _: _size(each.params, 'embedding', 0.0)),
    ]
    if experts:
        rows.append(row('  active a token', '', lambda each, _: _size(each.params, 'expert', share)))
    router = lambda each, layers: 2 * each.tokens * blocks.width * experts * layers if blocks else 0

    def forward(each: Outline, layers: int) -> float:
        return product_flops(each.forward, each.params, *each.batch) + router(each, layers)

    def backward(each: Outline, layers: int) -> float:
        return gradient_flops(_scalar(each), each.params, *each.batch) + 3 * router(each, layers)

    rows += [row('FLOP, forward', '', forward, True), row('FLOP, with backward', '', backward, True)]
    if layered:
        small = [each for _, each in ones]
        rows.append(_compilers('forward', lambda each: each.forward, small, layered))
        rows.append(_compilers('with backward', lambda each: jax.value_and_grad(_scalar(each)), small, layered))
    rows.append(row('activations', 'B', lambda each, _: saved_bytes(each.forward, each.params, *each.batch)))
    if whole.cache is not None:
        rows.append(row('key-value cache', 'B', lambda each, _: tree_bytes(each.cache)))
    return whole.what, rows


def _compilers(name: str, f: Callable[[Outline], Any], each: list[Outline], layers: int) -> CostRow:
    try:
        one, two = (compiler_flops(f(outline), outline.params, *outline.batch) for outline in each)
    except RuntimeError:  # XLA's, for an array of 2^63 elements or more
        return CostRow(f"  the compiler's, {name}", None, None, None, '')
    return CostRow(f"  the compiler's, {name}", two - one, 2 * one - two, one + (layers - 1) * (two - one), '')


def _scalar(outline: Outline) -> Callable[..., Any]:
    """Something to take a gradient of, without a loss's own products."""
    return lambda *args: jnp.sum(outline.forward(*args))


def _size(params: Any, kind: str, share: float) -> float:
    """Parameters; of those of a kind in `parameters.PARAMETER_RULES` only a share."""
    total = 0.0
    for keys, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        row = parameters.find_rule(checksum.path_string(keys))
        total += leaf.size * (share if row and row.kind == kind else 1.0)
    return total


def format_costs(what: str, rows: list[CostRow]) -> str:
    """The rows as text, bytes with their unit."""
    lines = [f'{"one row: " + what:<36}{"each layer":>22}{"the rest":>22}{"all":>24}']
    for each in rows:
        layer, rest, whole = (_shown(value, each.unit) for value in (each.layer, each.rest, each.whole))
        lines.append(f'{each.name:<36}{layer:>22}{rest:>22}{whole:>24}')
    return '\n'.join(lines)


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return ''
    return format_bytes(value) if unit == 'B' else f'{value:,.0f}'
