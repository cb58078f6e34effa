"""The config fields of a Transformer, and the recipe they make: one place for every task that has one.

    config.model = transformer.fields(name='language', width=128, heads=4, qk_norm='rms')

Nothing heavy is imported before a recipe is made, so experiments may import this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from attnlab.errors import UserError

if TYPE_CHECKING:
    from attnlab.layers.block import Recipe

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

DEEPEST = 1000
"""Layers outside of a scan: tracing takes about 10 ms a layer, several times."""

DEEPEST_SCAN = 100_000
"""Layers in a scan, each of which has a drop rate of its own."""

_POSITIONS = ('learned', 'sinusoidal', 'rotary', 'alibi', 'relative', 'none')
_DTYPES = ('float32', 'bfloat16', 'float16')
_MLPS = ('relu', 'gelu', 'gelu_tanh', 'swiglu', 'geglu', 'reglu')
_IMPLEMENTATIONS = ('auto', 'dense', 'blockwise', 'cudnn', 'splash', 'xla')


def fields(**changes: Any) -> dict[str, Any]:
    """All fields of a Transformer of text, with some changed or, such as `name`, added."""
    return {**FIELDS, **changes}


def check(model: Any) -> None:
    """Raises UserError for a value that no field can have; what does not fit together is the model's to say."""
    check_blocks(model)
    for name in ('context', 'taps'):
        if model[name] < 1:
            raise UserError(f'model.{name} is {model[name]}; expected 1 or more')
    if model.context >= 2**31:
        raise UserError(f'model.context is {model.context}; expected less than {2**31}: positions are 32-bit integers')
    if model.window < 0:
        raise UserError(f'model.window is {model.window}; expected 0 or more')
    check_names(model, positions=_POSITIONS)
    if model.mixer != 'attention' and model.positions in ('rotary', 'alibi', 'relative'):
        raise UserError(f'model.positions is {model.positions!r}, which turns attention, and model.mixer has none')


def check_blocks(model: Any) -> None:
    """`check` for the fields in `BLOCKS`."""
    for name in ('width', 'heads', 'active'):
        if model[name] < 1:
            raise UserError(f'model.{name} is {model[name]}; expected 1 or more')
    check_depth(model, 'layers', model.scan)
    for name in ('kv_heads', 'head_width', 'mlp_width', 'experts', 'capacity_factor', 'load_balance', 'router_z',
                 'init'):  # fmt: skip
        if model[name] < 0:
            raise UserError(f'model.{name} is {model[name]}; expected 0 or more')
    for name in ('dropout', 'attention_dropout', 'layer_drop'):
        if not 0.0 <= model[name] < 1.0:
            raise UserError(f'model.{name} is {model[name]}; expected 0 <= rate < 1')
    check_names(model, dtype=_DTYPES, qk_norm=('none', 'rms', 'l2'), mlp=_MLPS, implementation=_IMPLEMENTATIONS)
    if model.rotary_base <= 1.0:
        raise UserError(f'model.rotary_base is {model.rotary_base}; expected more than 1')


def check_depth(model: Any, name: str, scan: bool = False) -> None:
    """Raises UserError for more layers than can be traced; in a scan the layers are traced once."""
    most = DEEPEST_SCAN if scan else DEEPEST
    if not 1 <= model[name] <= most:
        more = '' if scan or name != 'layers' else f', or up to {DEEPEST_SCAN} with model.scan'
        raise UserError(f'model.{name} is {model[name]}; expected 1 to {most}{more}')


def check_names(model: Any, **known: Sequence[str]) -> None:
    """Raises UserError for a field whose value is none of its known ones."""
    for name, values in known.items():
        if model[name] not in values:
            raise UserError(f'model.{name} is {model[name]!r}; expected one of {", ".join(values)}')


def recipe(model: Any) -> Recipe:
    """The recipe of the blocks; what models of text alone have is read where it is there."""
    import jax.numpy as jnp

    from attnlab.layers.block import Recipe
    from attnlab.layers.multihead import Rotary

    return Recipe(
        model.heads, model.kv_heads or None, model.head_width or None, model.get('mixer', 'attention'),
        model.get('taps', 1), None if model.qk_norm == 'none' else model.qk_norm,
        Rotary(model.rotary_base) if model.positions == 'rotary' else None,
        model.sinks, model.positions == 'alibi', model.positions == 'relative', model.get('window') or None,
        model.norm, model.order, model.parallel, model.mlp, model.mlp_width or None,
        model.experts, model.active, model.capacity_factor or None, model.shared_expert, model.use_bias,
        model.dropout, model.attention_dropout, model.layer_drop, model.scaled_init, model.init or None,
        None if model.dtype == 'float32' else jnp.dtype(model.dtype),
        None if model.implementation == 'auto' else model.implementation,
    )  # fmt: skip


def added(model: Any) -> Any:
    """What is added to the embeddings for their positions."""
    return model.positions if model.positions in ('learned', 'sinusoidal') else 'none'


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
