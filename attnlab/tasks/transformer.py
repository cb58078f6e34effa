"""The config fields of a Transformer: one place for every task that has one.

    config.model = transformer.fields(name='language', width=128, heads=4, qk_norm='rms')

Nothing heavy is imported with it, so experiments may import this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnlab.errors import UserError

BLOCKS: dict[str, Any] = dict(
    layers=4,
    width=128,
    heads=4,
    kv_heads=0,  # 0: as many as heads
    head_width=0,  # 0: width / heads
    rotary_base=10000.0,
    qk_norm='none',  # none, rms, l2
    sinks=False,
    norm='layer',  # layer, rms
    order='pre',  # pre, post, sandwich
    parallel=False,
    mlp='gelu',  # relu, gelu, gelu_tanh, swiglu, geglu, reglu
    mlp_width=0,  # 0: 4 width, or 8/3 width where gated
    experts=0,
    active=2,
    capacity_factor=0.0,  # 0: every token is served
    shared_expert=False,
    load_balance=0.01,  # weights of the experts' two losses
    router_z=0.001,
    use_bias=True,
    dropout=0.0,
    attention_dropout=0.0,
    layer_drop=0.0,  # of the last block; less in those before it
    scaled_init=True,  # what leads out of a branch starts smaller by sqrt(2 layers)
    init=0.02,  # standard deviation of kernels; 0: by their fan-in
    dtype='float32',  # of the computation: float32, bfloat16, float16
    implementation='auto',  # of attention: auto, dense, blockwise, cudnn, splash
    scan=False,  # blocks as one compiled loop
    remat='none',  # what the backward pass computes again: none, dots, full
)
"""What every model of blocks has."""

FIELDS: dict[str, Any] = BLOCKS | dict(
    context=64,  # tokens a row; a table of learned positions has so many
    positions='learned',  # learned, sinusoidal, rotary, alibi, relative, none
    mixer='attention',  # attention, convolution, gru, lstm
    taps=4,  # of a convolution
    window=0,  # keys before the query that it may see; 0: all
)
"""What a model of text has."""


def fields(**changes: Any) -> dict[str, Any]:
    """All fields of a Transformer of text, with some changed or, such as `name`, added."""
    return {**FIELDS, **changes}


_TRIED: set[str] = set()


def try_init(model: Any, init: Callable[..., Any]) -> None:
    """Raises UserError where parameters cannot be made, with the reason that the layers give; makes none.

    model: the section of the config that says all of it.  Points of a sweep often have the same, which is tried once.
    """
    import jax

    if (said := model.to_json()) in _TRIED:
        return
    try:
        jax.eval_shape(init, jax.random.key(0))
    except (ValueError, NotImplementedError, TypeError, OverflowError) as error:  # the last two for sizes over 63 bits
        raise UserError(f'model: {str(error).splitlines()[0]}') from error
    _TRIED.add(said)


def outlined(model: Any, layers: int | None, active: bool) -> Any:
    """The fields for counting: with so many layers in a loop; active: with a dense layer for the experts a token meets.

    Active ones attend as the definition says, whose products all show.
    """
    from attnlab.layers.mlp import hidden_width

    with model.copy_and_resolve_references().unlocked() as changed:
        if layers is not None:
            changed.layers, changed.scan = layers, False
        if active:
            changed.implementation = 'dense'
        if active and model.experts:
            each = model.mlp_width or hidden_width(model.mlp, model.width)
            changed.mlp_width, changed.experts = each * (model.active + model.shared_expert), 0
    return changed


def auxiliary(model: Any, said: Any, weight: Any) -> tuple[Any, dict[str, Any]]:
    """What the experts add to a loss that sums over `weight` things, and what to watch of them; 0 and {} without."""
    import jax.numpy as jnp

    if not said:
        return 0.0, {}
    watched = {f'experts_{name}': jnp.mean(each) * weight for name, each in said.items()}
    more = model.load_balance * jnp.sum(said['load_balance']) + model.router_z * jnp.sum(said['z'])
    return more * weight, watched
