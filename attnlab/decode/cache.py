"""Decoding of a language model with a cache: the state of its layers after the tokens so far, as one tree of arrays.

    cache = init_cache(model, params, batch_size=2, max_length=64)
    cache, logits = extend_cache(model, params, cache, prompts, token_mask)  # [B, T], in any number of calls
    result = sample_tokens(make_decode_step(model, params), cache, first_tokens, rng=rng, max_tokens=20)

The first axis of every array is the batch, so `sample_tokens` and `beam_search` can take the cache as their state.
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


@partial(jax.tree_util.register_dataclass, data_fields=['length', 'layers'], meta_fields=['max_length'])
@dataclasses.dataclass(frozen=True)
class DecodingCache:
    """The state of a language model's layers after the tokens so far.

    max_length: maximum number of tokens in a row; static in a compiled program.
    length: [B] int32, the number of tokens in each row.
    layers: the state of each layer: keys and values, a recurrent state, or the last inputs of a convolution.
    """

    max_length: int
    length: Int[Array, ' B']
    layers: Any


def init_cache(model: LanguageModel, params: Params, batch_size: int, max_length: int) -> DecodingCache:
    """Return an empty cache of `batch_size` rows, each with room for `max_length` tokens.

    Raises ValueError if max_length is below 1, or above the number of learned positions of a model that has them.
    """
    if max_length < 1:
        raise ValueError(f'max_length is {max_length}; expected at least 1')
    if (limit := model.encoding.max_length) is not None and max_length > limit:
        raise ValueError(f'max_length is {max_length}; expected at most {limit}, the learned positions of the model')
    no_tokens = jnp.zeros((batch_size, 0), jnp.int32)
    cached_model = model.clone(cache_length=max_length)
    apply = lambda params: cached_model.apply({'params': params}, no_tokens, mutable=['cache'], method='hidden')
    shapes = jax.eval_shape(apply, params)[1]['cache']
    return _from_collection(max_length, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))


def extend_cache(
    model: LanguageModel,
    params: Params,
    cache: DecodingCache,
    tokens: Int[Array, 'B T'],
    token_mask: Bool[Array, 'B T'] | None = None,
) -> tuple[DecodingCache, Float[Array, 'B T V']]:
    """Return the cache with these tokens added, and the logits of the token after each.

    In a compiled program, the logits are NaN from the first token on that has no room in the cache.

    Args:
      tokens: [B, T] int, which continue after the tokens in the cache.
      token_mask: [B, T], False for padding, which may be anywhere in a row.  It does not change the cache, and its
        logits are undefined.  None: all tokens are real.

    Raises:
      ValueError: if the cache has no room for the tokens and its lengths are known (not traced).
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
    """Return the cache with these tokens added, and the hidden states that `LanguageModel.logits` takes.

    With a large vocabulary, the logits of the last token alone are much cheaper than those of all tokens.  Arguments
    and errors are those of `extend_cache`.
    """
    _check_room(cache, tokens, token_mask)
    segments = None if token_mask is None else jnp.asarray(token_mask).astype(jnp.int32)
    collection = {'past': {'length': cache.length}, 'stack': cache.layers}
    (x, _), changed = model.clone(cache_length=cache.max_length).apply(
        {'params': params, 'cache': collection}, tokens, segments, mutable=['cache'], method='hidden'
    )
    return _from_collection(cache.max_length, changed['cache']), x


def prefill(
    model: LanguageModel,
    params: Params,
    cache: DecodingCache,
    prompts: Int[Array, 'B T'],
    token_mask: Bool[Array, 'B T'],
) -> tuple[DecodingCache, Int[Array, ' B']]:
    """Add all tokens of each prompt but the last to the cache; return the cache and the last tokens.

    They are the arguments `state` and `first_tokens` of `sample_tokens` and `beam_search`.

    token_mask: [B, T], True for the tokens of prompts; each row has at least one.
    """
    positions = jnp.where(token_mask, jnp.arange(prompts.shape[1])[None], -1)
    last = jnp.max(positions, axis=1)[:, None]
    cache, _ = extend_cache_without_logits(model, params, cache, prompts, token_mask & (positions != last))
    return cache, jnp.take_along_axis(prompts, last, axis=1)[:, 0]


def make_decode_step(model: LanguageModel, params: Params) -> DecodeStep:
    """Return a decoding step for `sample_tokens` and `beam_search`, whose state is a cache."""

    def step(cache: DecodingCache, tokens: Int[Array, ' B']) -> tuple[DecodingCache, Float[Array, 'B V']]:
        cache, logits = extend_cache(model, params, cache, tokens[:, None])
        return cache, logits[:, 0]

    return step


def _from_collection(max_length: int, collection: Any) -> DecodingCache:
    """Return the cache that a model's Flax collection `cache` holds."""
    return DecodingCache(max_length, collection['past']['length'], collection['stack'])


def _check_room(cache: DecodingCache, tokens: Array, token_mask: Array | None) -> None:
    """Raise ValueError if the cache has no room for the tokens, unless its lengths or the mask are traced."""
    if isinstance(cache.length, Tracer) or isinstance(token_mask, Tracer):
        return
    lengths = np.asarray(cache.length)
    if token_mask is None:
        added = np.full(len(lengths), tokens.shape[1])
    else:
        added = np.sum(np.asarray(token_mask), axis=1)
    full_rows = np.flatnonzero(lengths + added > cache.max_length)
    if full_rows.size:
        row = full_rows[0]
        raise ValueError(
            f'the cache has room for {cache.max_length} tokens in a row; '
            f'row {row} holds {lengths[row]} tokens, and {added[row]} more were given'
        )
