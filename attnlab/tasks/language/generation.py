"""A trained language model that writes."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import environment
from attnlab.data.tokenizers import SubwordTokenizer, Tokenizer
from attnlab.data.vocabulary import warn_of_unknown_words
from attnlab.decode import cache
from attnlab.decode.sampling import SampleResult, check_decoded_tokens, sample_tokens
from attnlab.errors import UserError
from attnlab.models.language import LanguageModel
from attnlab.tasks.task import Params


def generate_texts(
    model: LanguageModel,
    params: Params,
    vocabulary: Tokenizer,
    prompt: str,
    documents: bool,
    *,
    tokens: int = 200,
    samples: int = 1,
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> list[str]:
    """The prompt with at most so many tokens behind it, `samples` times.

    A model sees `context` tokens: when they are full it goes on from the last half of them, and the log says so.
    documents: the prompt opens a document, and each sample ends with its own.
    temperature, top_k, top_p: as in `attnlab.decode.sampling.sample_tokens`.  Sample i is the same however many there are.

    Raises:
      UserError: for numbers out of range, texts that are larger than the memory, a prompt of characters that the model
        does not know, and one without any.
      RunError: if the model's logits are NaN or infinite.
    """
    for name, number in (('tokens', tokens), ('samples', samples)):
        if number < 1:
            raise UserError(f'{name} is {number}; expected at least 1')
    if not 0 <= seed < 2**32:  # a key of JAX takes 32 bits
        raise UserError(f'seed is {seed}; expected 0 to {2**32 - 1}')
    ids = encode_prompt(vocabulary, prompt, documents)
    end = vocabulary.marks[1] if documents and vocabulary.marks else None
    _check_memory(model, params, samples, len(ids) + tokens)
    go_on = build_sampler(model, end, temperature, top_k, top_p)
    texts, want = [ids.tolist() for _ in range(samples)], len(ids) + tokens
    open_rows = np.ones(samples, bool)
    turn, context = 0, model.config.context
    while open_rows.any():
        # A text that has ended is not read any more, and leaves the others all their room.
        windows = [_window(text, context if more else 1) for text, more in zip(texts, open_rows, strict=True)]
        left = want - max(map(len, texts))
        room = min(left, context - max(map(len, windows)) + 1)
        key = jax.random.fold_in(jax.random.key(seed), turn)
        sampled = go_on(params, *_padded(windows, context), key, room)
        check_decoded_tokens(np.asarray(sampled.tokens)[open_rows])
        for row in np.flatnonzero(open_rows):
            more = np.asarray(sampled.tokens[row, : int(sampled.lengths[row])]).tolist()
            texts[row] += more
            open_rows[row] = len(texts[row]) < want and (end is None or more[-1] != end)
        if turn == 0 and open_rows.any():
            logging.info('the context of %d tokens is full: goes on from its last half', context)
        turn += 1
    return [vocabulary.decode(text) for text in texts]


def encode_prompt(vocabulary: Tokenizer, prompt: str, documents: bool) -> np.ndarray:
    """The ids that a prompt begins with."""
    ids = vocabulary.encode(prompt, 'prompt')
    if isinstance(
        vocabulary, SubwordTokenizer
    ):  # characters refuse unknown ones; bytes do not show which were trained on
        warn_of_unknown_words(vocabulary.vocabulary, prompt.split('\n'))
    marks = vocabulary.marks if documents else None
    if not len(ids) and (prompt or marks is None):  # sub-words leave nothing of a prompt of invisible characters
        raise UserError('the prompt is empty; expected some text to go on from')
    return ids if marks is None else np.concatenate([[marks[0]], ids])


def _check_memory(model: LanguageModel, params: Params, samples: int, length: int) -> None:
    """Raise UserError where so many texts of `length` tokens, and the cache of each, are larger than the memory."""
    held = jax.eval_shape(lambda params: cache.init_cache(model, params, 1, model.config.context), params)
    kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held))
    on_device = samples * (2 * kept + 8 * model.vocabulary)  # the cache before and after a step, and float32 logits
    text = samples * 40 * length  # a list of Python integers: 8 bytes for a place and 32 for an integer
    host, device = environment.host_memory_bytes(), jax.local_devices()[0]
    if device.platform == 'cpu':
        room, needed = host, on_device + text
    else:
        room, needed = (device.memory_stats() or {}).get('bytes_limit', host), on_device
    if needed > room or text > host:
        came = f'{samples} samples of {length} tokens take about {max(needed, text):.2g} bytes'
        raise UserError(f'{came}; this machine has {min(room, host):.2g}; expected fewer samples or tokens')


def build_sampler(
    model: LanguageModel, end: int | None, temperature: float, top_k: int | None, top_p: float | None
) -> Any:
    """(params, windows [B, context], real [B, context], key, room) -> Sampled, compiled once a batch size."""

    @jax.jit
    def go_on(params: Params, windows: jax.Array, real: jax.Array, rng: jax.Array, room: jax.Array) -> SampleResult:
        empty = cache.init_cache(model, params, windows.shape[0], model.config.context)
        state, first = cache.prefill(model, params, empty, windows, real)
        return sample_tokens(
            cache.make_decode_step(model, params), state, first, rng=rng, max_tokens=model.config.context,
            dynamic_max_tokens=room, eos_id=end, temperature=temperature, top_k=top_k, top_p=top_p,
        )  # fmt: skip

    return go_on


def _window(text: list[int], context: int) -> list[int]:
    """What the model sees of a text: all of it, or when that leaves no room, the last half of its context."""
    return text if len(text) <= context else text[-max(1, context // 2) :]


def _padded(windows: list[list[int]], width: int) -> tuple[jax.Array, jax.Array]:
    tokens, real = np.zeros((len(windows), width), np.int32), np.zeros((len(windows), width), bool)
    for row, window in enumerate(windows):
        tokens[row, : len(window)], real[row, : len(window)] = window, True
    return jnp.asarray(tokens), jnp.asarray(real)
