"""A language model that goes on: what its layers keep of the tokens so far, as one tree of arrays.

    cache = start(model, params, B=2, slots=64)
    cache, logits = extend(model, params, cache, prompts, token_mask)  # [B, T] in any split, padded on either side
    sampled = sample(stepper(model, params), cache, first, rng=rng, limit=20)

Every leaf leads with the batch, so that `sample` and `beam_search` take the cache as their state.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from attnlab.decode.sampling import DecodeStep
from attnlab.models.language import LanguageModel

Params = Any


@partial(jax.tree_util.register_dataclass, data_fields=['length', 'layers'], meta_fields=['slots'])
@dataclasses.dataclass(frozen=True)
class DecodingCache:
    """slots: the tokens a row has room for, fixed in a compiled program.  length: [B], how many it holds.

    layers: what each keeps of them: keys and values, a recurrent state, the last inputs of a convolution.
    """

    slots: int
    length: Int[Array, ' B']
    layers: Any


def init_cache(model: LanguageModel, params: Params, B: int, slots: int) -> DecodingCache:
    """The cache of B rows before their first token, with room for so many tokens each.

    Raises ValueError for fewer slots than one, and for more than a model with learned positions has of these.
    """
    if slots < 1:
        raise ValueError(f'slots is {slots}; expected at least 1')
    if (longest := model.encoding.longest) is not None and slots > longest:
        raise ValueError(f'slots is {slots}; expected at most {longest}, the learned positions of the model')
    empty = jnp.zeros((B, 0), jnp.int32)
    cached = model.clone(cache_length=slots)
    apply = lambda params: cached.apply({'params': params}, empty, mutable=['cache'], method='hidden')
    shapes = jax.eval_shape(apply, params)[1]['cache']
    return _cache(slots, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))


def extend_cache(
    model: LanguageModel,
    params: Params,
    cache: DecodingCache,
    tokens: Int[Array, 'B T'],
    token_mask: Bool[Array, 'B T'] | None = None,
) -> tuple[DecodingCache, Float[Array, 'B T V']]:
    """The cache with these tokens, and the logits of the token after each.

    token_mask: [B, T], false in padding, which may stand anywhere and leaves no trace; its logits mean nothing.
    A cache that has no room for them is refused, if its lengths are known; in a compiled program, the logits from the
    first token on that has no slot are NaN.

    Raises:
      ValueError: for a cache that is full, naming its slots and lengths.
    """
    cache, x = extend_cache_without_logits(model, params, cache, tokens, token_mask)
    return cache, model.apply({'params': params}, x, method='logits')  # pyright: ignore[reportReturnType]


def extend_cache_without_logits(
    model: LanguageModel,
    params: Params,
    cache: DecodingCache,
    tokens: Int[Array, 'B T'],
    token_mask: Bool[Array, 'B T'] | None = None,
) -> tuple[DecodingCache, Float[Array, 'B T D']]:
    """`extend_cache` without the product that makes logits: where V is large, one takes it of the last token alone."""
    _check_room(cache, tokens, token_mask)
    segments = None if token_mask is None else jnp.asarray(token_mask).astype(jnp.int32)
    held = {'past': {'length': cache.length}, 'stack': cache.layers}
    (x, _), changed = model.clone(cache_length=cache.slots).apply(
        {'params': params, 'cache': held}, tokens, segments, mutable=['cache'], method='hidden'
    )
    return _cache(cache.slots, changed['cache']), x


def prefill(
    model: LanguageModel,
    params: Params,
    cache: DecodingCache,
    prompts: Int[Array, 'B T'],
    token_mask: Bool[Array, 'B T'],
) -> tuple[DecodingCache, Int[Array, ' B']]:
    """The cache with all of each prompt but its last token, and that token: `state` and `first` of a decoding.

    Each row of `token_mask` is true somewhere.
    """
    places = jnp.where(token_mask, jnp.arange(prompts.shape[1])[None], -1)
    last = jnp.max(places, axis=1)[:, None]
    cache, _ = extend_cache_without_logits(model, params, cache, prompts, token_mask & (places != last))
    return cache, jnp.take_along_axis(prompts, last, axis=1)[:, 0]


def make_decode_step(model: LanguageModel, params: Params) -> DecodeStep:
    """One token a row: the step of `sample` and `beam_search`, whose state is a cache."""

    def step(cache: DecodingCache, tokens: Int[Array, ' B']) -> tuple[DecodingCache, Float[Array, 'B V']]:
        cache, logits = extend_cache(model, params, cache, tokens[:, None])
        return cache, logits[:, 0]

    return step


def _cache(slots: int, held: Any) -> DecodingCache:
    return DecodingCache(slots, held['past']['length'], held['stack'])


def _check_room(cache: DecodingCache, tokens: Array, token_mask: Array | None) -> None:
    if isinstance(cache.length, Tracer) or isinstance(token_mask, Tracer):
        return
    held = np.asarray(cache.length)
    more = np.full(len(held), tokens.shape[1]) if token_mask is None else np.sum(np.asarray(token_mask), axis=1)
    full = np.flatnonzero(held + more > cache.slots)
    if full.size:
        row = full[0]
        came = f'row {row} holds {held[row]} tokens and {more[row]} more came'
        raise ValueError(f'the cache has {cache.slots} slots: {came}')
