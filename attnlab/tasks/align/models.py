"""The translation models of configs, behind one set of functions."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attnlab.configs import RecurrentConfig, TranslatorConfig
from attnlab.models.maps import attention_maps
from attnlab.models.recurrent import RecurrentSeq2Seq
from attnlab.models.transformer import TransformerSeq2Seq


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


def build(config: RecurrentConfig | TranslatorConfig, source_size: int, target_size: int) -> Model:
    """The model of a config for vocabularies of the given sizes."""
    if isinstance(config, RecurrentConfig):
        return _recurrent(RecurrentSeq2Seq(source_size, target_size, config))
    return _transformer(TransformerSeq2Seq(source_size, target_size, config))


def attends(config: RecurrentConfig | TranslatorConfig) -> bool:
    """Whether the decoder has attention to the source."""
    return isinstance(config, TranslatorConfig) or config.attention != 'none'


def _init(model: Any) -> Callable[[jax.Array], Any]:
    def init(rng: jax.Array) -> Any:
        tokens = jnp.ones((1, 2), jnp.int32)
        return model.init(rng, tokens, tokens)['params']

    return init


def _forward(model: Any, params: Any, source: Any, inputs: Any, rng: Any) -> Any:
    noise: dict[str, Any] = {} if rng is None else {'deterministic': False, 'rngs': {'dropout': rng}}
    return model.apply({'params': params}, source, inputs, **noise)


def _recurrent(model: RecurrentSeq2Seq) -> Model:
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


def _transformer(model: TransformerSeq2Seq) -> Model:
    config = model.config
    layer = config.alignment_layer - 1

    def read_all(params: Any, source: Any, inputs: Any) -> tuple[Any, dict[str, Any]]:
        (logits, _), sown = model.apply({'params': params}, source, inputs, mutable=['intermediates'])
        return logits, attention_maps(sown['intermediates'])

    def read(params: Any, source: Any, inputs: Any) -> tuple[Any, Any]:
        logits, found = read_all(params, source, inputs)
        return logits, jnp.mean(found['decoder/cross_attention'], axis=2)

    def decoder(limit: int) -> Callable[..., Any]:
        cached = model.clone(cache_length=limit)
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
    return Model(_init(model), forward, read, maps, start, step, layer, config.alignment_shift, model.encoding.longest)
