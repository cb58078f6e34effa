"""Costs of a config, from shapes alone: parameters, floating-point operations, activations, key-value cache."""

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
    """One cost of a model: a row of the table that `attnlab count` prints.

    layer: cost of one layer.
    rest: cost of everything outside of the layers.
    whole: cost of the whole model.
    unit: 'B' for bytes, otherwise ''.

    `layer` and `rest` are None if the layers are not all alike; all three are None if the cost cannot be computed.
    """

    name: str
    layer: float | None
    rest: float | None
    whole: float | None
    unit: str


def count_costs(config: RunConfig | ConfigDict) -> tuple[str, list[CostRow]]:
    """Return a description of one row of a batch, and the costs of a config for it; nothing is allocated.

    Floating-point operations (FLOP) are those of matrix products, two for each multiplication.  Attention counts all
    pairs of tokens, also masked ones.  A mixture of experts counts the experts that a token uses.

    XLA's own estimate also contains additions, norms and the like.  XLA counts the body of a scan once, so the estimate
    is made for one and for two layers without a scan and extrapolated to all layers.  It is None if an array has 2^63
    elements or more, which XLA cannot represent.

    Activations are the arrays that the forward pass keeps for the backward pass; XLA may keep less.
    """
    task = tasks.create_task(config)
    outline = require_support(task, SupportsOutline, 'have a model that can be counted').outline
    as_configured, dense = outline(None, False), outline(None, True)
    model = getattr(task.config, 'model', None)
    blocks = model if isinstance(model, BlockConfig) else None
    layers, experts = (blocks.layers, blocks.experts) if blocks else (0, 0)
    # (as configured, dense) with one layer and with two.
    small = [(outline(count, False), outline(count, True)) for count in (1, 2)] if layers else []

    def make_row(name: str, unit: str, cost: Callable[[Outline, int], float], is_dense: bool = False) -> CostRow:
        """cost: (outline, its number of layers) -> cost.  is_dense: whether to use the dense outlines."""
        whole = cost(dense if is_dense else as_configured, layers)
        if not layers:
            return CostRow(name, None, None, whole, unit)
        one, two = (cost(outlines[is_dense], count) for count, outlines in enumerate(small, 1))
        return CostRow(name, two - one, 2 * one - two, whole, unit)

    active_share = blocks.experts_per_token / experts if blocks and experts else 1.0
    rows = [
        make_row('parameters', '', lambda model, _: tree_size(model.params)),
        make_row('  without embeddings', '', lambda model, _: _weighted_size(model.params, 'embedding', 0.0)),
    ]
    if experts:
        active_size = lambda model, _: _weighted_size(model.params, 'expert', active_share)
        rows.append(make_row('  active per token', '', active_size))
    router_flops = lambda model, layers: 2 * model.tokens * blocks.width * experts * layers if blocks else 0

    def forward_flops(model: Outline, layers: int) -> float:
        return product_flops(model.forward, model.params, *model.batch) + router_flops(model, layers)

    def forward_backward_flops(model: Outline, layers: int) -> float:
        return gradient_flops(_sum_of_outputs(model), model.params, *model.batch) + 3 * router_flops(model, layers)

    rows.append(make_row('FLOP, forward', '', forward_flops, is_dense=True))
    rows.append(make_row('FLOP, forward and backward', '', forward_backward_flops, is_dense=True))
    if layers:
        small_dense = [outlines[1] for outlines in small]
        gradient = lambda model: jax.value_and_grad(_sum_of_outputs(model))
        rows.append(_compiler_row('  XLA estimate, forward', lambda model: model.forward, small_dense, layers))
        rows.append(_compiler_row('  XLA estimate, forward and backward', gradient, small_dense, layers))
    saved = lambda model, _: saved_bytes(model.forward, model.params, *model.batch)
    rows.append(make_row('activations', 'B', saved))
    if as_configured.cache is not None:
        rows.append(make_row('key-value cache', 'B', lambda model, _: tree_bytes(model.cache)))
    return as_configured.description, rows


def _compiler_row(
    name: str, make_function: Callable[[Outline], Callable[..., Any]], small: list[Outline], layers: int
) -> CostRow:
    """Return XLA's estimate for `layers` layers, extrapolated from the outlines with one and with two layers.

    make_function: returns the function to count, for an outline.
    """
    try:
        one, two = (compiler_flops(make_function(model), model.params, *model.batch) for model in small)
    except RuntimeError:  # raised by XLA for an array of 2^63 elements or more
        return CostRow(name, None, None, None, '')
    return CostRow(name, two - one, 2 * one - two, one + (layers - 1) * (two - one), '')


def _sum_of_outputs(model: Outline) -> Callable[..., Any]:
    """Return a scalar function of the model whose gradient can be taken; it adds no products, as a loss might."""
    return lambda *args: jnp.sum(model.forward(*args))


def _weighted_size(params: Any, kind: str, weight: float) -> float:
    """Return the number of parameters; those of a kind in `parameters.PARAMETER_RULES` count `weight` each."""
    size = 0.0
    for keys, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        rule = parameters.find_rule(checksum.path_string(keys))
        size += leaf.size * (weight if rule and rule.kind == kind else 1.0)
    return size


def format_costs(what: str, rows: list[CostRow]) -> str:
    """Return a text table of costs, bytes with their unit.  what: description of one row of a batch."""
    lines = [f'{"one row: " + what:<36}{"each layer":>22}{"the rest":>22}{"all":>24}']
    for row in rows:
        layer, rest, whole = (_format_cost(value, row.unit) for value in (row.layer, row.rest, row.whole))
        lines.append(f'{row.name:<36}{layer:>22}{rest:>22}{whole:>24}')
    return '\n'.join(lines)


def _format_cost(value: float | None, unit: str) -> str:
    if value is None:
        return ''
    return format_bytes(value) if unit == 'B' else f'{value:,.0f}'
