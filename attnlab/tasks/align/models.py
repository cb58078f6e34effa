"""The translation models of configs, behind one set of functions."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attnlab.errors import UserError
from attnlab.models.maps import attention_maps
from attnlab.models.recurrent import RecurrentSeq2Seq
from attnlab.models.transformer import TransformerSeq2Seq
from attnlab.tasks import transformer


class Model(NamedTuple):
    """A model as pure functions of its parameters.

    init: key -> parameters.
    forward: (params, source [B, S], inputs [B, T], key) -> (logits [B, T, V], what experts say of themselves); without
      noise if the key is None.
    read: (params, source, inputs) -> (logits, attention [B, L, T, S] of each layer, the mean of its heads).
    maps: (params, source, inputs) -> every attention of the model [B, L, N, T, S], by its name.
    start: (params, source, limit) -> the state before the first of `limit` tokens.
    step: (params, limit, state, tokens [B]) -> (state, logits [B, V], attention [B, S] of `layer`).
    layer, shift: which layer's attention is the alignment, and how many steps after a word it is read.
    longest: the most tokens that a side may have, where positions are learned; else None.
    """

    init: Callable[..., Any]
    forward: Callable[..., Any]
    read: Callable[..., Any]
    maps: Callable[..., Any]
    start: Callable[..., Any]
    step: Callable[..., Any]
    layer: int = 0
    shift: int = 0
    longest: int | None = None


def build(config: Any, source_size: int, target_size: int) -> Model:
    """The model of a config for vocabularies of the given sizes; UserError for values that make none."""
    match config.model.name:
        case 'recurrent':
            return _recurrent(config.model, source_size, target_size)
        case 'transformer':
            return _transformer(config.model, config.data.widths, source_size, target_size)
        case name:
            raise UserError(f"model.name is {name!r}; expected 'recurrent' or 'transformer'")


def most_tokens(width: int) -> int:
    """The tokens after which a translation of a source of this width is cut: far more than French needs."""
    return 2 * width + 8


def attends(config: Any) -> bool:
    """Whether there is an attention to the source to look at."""
    return config.model.name == 'transformer' or config.model.attention != 'none'


def _init(model: Any) -> Callable[[jax.Array], Any]:
    def init(rng: jax.Array) -> Any:
        tokens = jnp.ones((1, 2), jnp.int32)
        return model.init(rng, tokens, tokens)['params']

    return init


def _forward(model: Any, params: Any, source: Any, inputs: Any, rng: Any) -> Any:
    noise: dict[str, Any] = {} if rng is None else {'deterministic': False, 'rngs': {'dropout': rng}}
    return model.apply({'params': params}, source, inputs, **noise)


def _recurrent(fields: Any, source_size: int, target_size: int) -> Model:
    for field, allowed in (('cell', ('gru', 'lstm')), ('attention', ('additive', 'dot', 'none'))):
        if fields[field] not in allowed:
            raise UserError(f'model.{field} is {fields[field]!r}; expected one of {", ".join(allowed)}')
    transformer.check_depth(fields, 'encoder_layers')
    for field in ('embedding', 'hidden'):
        if fields[field] < 1:
            raise UserError(f'model.{field} is {fields[field]}; expected 1 or more')
    if not 0.0 <= fields.dropout < 1.0:
        raise UserError(f'model.dropout is {fields.dropout}; expected 0 <= rate < 1')
    if fields.original and (fields.cell != 'gru' or fields.attention == 'dot' or fields.hidden % 2):
        made = f'cell {fields.cell!r}, attention {fields.attention!r} and hidden {fields.hidden}'
        raise UserError(f"model.original has a GRU, attention 'additive' or 'none' and an even hidden, not {made}")
    model = RecurrentSeq2Seq(
        source_size, target_size, fields.cell, fields.embedding, fields.hidden, fields.encoder_layers,
        fields.bidirectional, fields.reverse_source, fields.attention, fields.dropout, fields.original,
    )  # fmt: skip

    forward = lambda *args: (_forward(model, *args)[0], {})

    def read(params: Any, source: Any, inputs: Any) -> tuple[Any, Any]:
        logits, weights = model.apply({'params': params}, source, inputs)
        return logits, jnp.expand_dims(jnp.asarray(weights), 1)

    def maps(params: Any, source: Any, inputs: Any) -> dict[str, Any]:
        weights = read(params, source, inputs)[1]
        return {'decoder/cross_attention': weights[:, :, None]} if weights.size else {}

    def step(params: Any, limit: int, state: Any, tokens: Any) -> tuple[Any, Any, Any]:
        inner, memory = state
        made: Any = model.apply({'params': params}, inner, memory, tokens, method='decode')
        inner, logits, weights = made
        return (inner, memory), logits, weights

    start = lambda params, source, limit: model.apply({'params': params}, source, method='encode')
    return Model(_init(model), forward, read, maps, start, step)


def _transformer(fields: Any, widths: Sequence[int], source_size: int, target_size: int) -> Model:
    transformer.check(fields)
    if fields.mixer != 'attention':
        raise UserError(f"model.mixer is {fields.mixer!r}; an encoder sees both sides, expected 'attention'")
    if not 1 <= fields.alignment_layer <= fields.layers:
        raise UserError(f'model.alignment_layer is {fields.alignment_layer}; expected 1 to {fields.layers}, the layers')
    if fields.alignment_shift not in (0, 1):
        raise UserError(f'model.alignment_shift is {fields.alignment_shift}; expected 0 or 1')
    longest = fields.context if fields.positions == 'learned' else None
    if longest is not None and longest < most_tokens(widths[-1]):
        needed = f'{most_tokens(widths[-1])}, what a translation of {widths[-1]} tokens may take'
        raise UserError(f'model.context is {fields.context} with learned positions; expected at least {needed}')
    model = TransformerSeq2Seq(
        source_size, target_size, fields.width, fields.layers, fields.context, transformer.recipe(fields),
        transformer.added(fields), fields.shared_embedding, fields.scan, fields.remat,
    )  # fmt: skip
    layer = fields.alignment_layer - 1

    def read_all(params: Any, source: Any, inputs: Any) -> tuple[Any, dict[str, Any]]:
        (logits, _), sown = model.apply({'params': params}, source, inputs, mutable=['intermediates'])
        return logits, attention_maps(sown['intermediates'])

    def read(params: Any, source: Any, inputs: Any) -> tuple[Any, Any]:
        logits, found = read_all(params, source, inputs)
        return logits, jnp.mean(found['decoder/cross_attention'], axis=2)

    def decoder(limit: int) -> Callable[..., Any]:
        cached = model.clone(recipe=dataclasses.replace(model.recipe, slots=limit))
        mutable = ['cache', 'intermediates']
        return lambda variables, *args: cached.apply(variables, *args, mutable=mutable, method='decode')

    def start(params: Any, source: Any, limit: int) -> Any:
        memory, _ = model.apply({'params': params}, source, method='encode')
        empty = jnp.zeros((source.shape[0], 0), jnp.int32)
        _, changed = decoder(limit)({'params': params}, source, memory, empty)
        return {'source': source, 'memory': memory, 'cache': changed['cache']}

    def step(params: Any, limit: int, state: Any, tokens: Any) -> tuple[Any, Any, Any]:
        variables = {'params': params, 'cache': state['cache']}
        (x, _), changed = decoder(limit)(variables, state['source'], state['memory'], tokens[:, None])
        logits = model.apply({'params': params}, x[:, 0], method='logits')
        weights = attention_maps(changed['intermediates'])['decoder/cross_attention'][:, layer, :, 0]
        return state | {'cache': changed['cache']}, logits, jnp.mean(weights, axis=1)

    maps = lambda params, source, inputs: read_all(params, source, inputs)[1]
    forward = partial(_forward, model)
    return Model(_init(model), forward, read, maps, start, step, layer, fields.alignment_shift, longest)
