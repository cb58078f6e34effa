"""Text generation by a trained language model."""

import logging
from collections.abc import Callable

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
    """Return `samples` texts: the prompt, followed by at most `tokens` generated tokens.

    A model reads at most `context` tokens. When the context is full, generation continues from the second half of it,
    and a line of the log says so.
    documents: the prompt starts a document, and a sample ends where its document ends.
    seed: sample i depends on the seed and on i, not on the number of samples.
    temperature, top_k, top_p: as in `attnlab.decode.sampling.sample_tokens`.

    Raises:
      UserError: if a number is out of range, the texts and caches do not fit into memory, the prompt has a character
        that the model does not have, or the prompt is empty and the model was not trained on documents.
      RunError: if the model's logits are NaN or infinite.
    """
    for name, number in (('tokens', tokens), ('samples', samples)):
        if number < 1:
            raise UserError(f'{name} is {number}; expected at least 1')
    if not 0 <= seed < 2**32:  # `jax.random.key` takes 32 bits
        raise UserError(f'seed is {seed}; expected 0 to {2**32 - 1}')
    ids = encode_prompt(vocabulary, prompt, documents)
    end = vocabulary.marks[1] if documents and vocabulary.marks else None
    _check_memory(model, params, samples, len(ids) + tokens)
    sampler = build_sampler(model, end, temperature, top_k, top_p)
    texts, max_length = [ids.tolist() for _ in range(samples)], len(ids) + tokens
    is_open = np.ones(samples, bool)
    turn, context = 0, model.config.context
    while is_open.any():
        # A finished text has a window of one token, so that it does not reduce how many tokens the others may add.
        windows = [_window(text, context if unfinished else 1) for text, unfinished in zip(texts, is_open, strict=True)]
        remaining = max_length - max(map(len, texts))
        max_new = min(remaining, context - max(map(len, windows)) + 1)
        key = jax.random.fold_in(jax.random.key(seed), turn)
        sampled = sampler(params, *_pad_windows(windows, context), key, max_new)
        check_decoded_tokens(np.asarray(sampled.tokens)[is_open])
        for row in np.flatnonzero(is_open):
            new = np.asarray(sampled.tokens[row, : int(sampled.lengths[row])]).tolist()
            texts[row] += new
            is_open[row] = len(texts[row]) < max_length and (end is None or new[-1] != end)
        if turn == 0 and is_open.any():
            logging.info('the context of %d tokens is full: generation continues from its last half', context)
        turn += 1
    return [vocabulary.decode(text) for text in texts]


def encode_prompt(vocabulary: Tokenizer, prompt: str, documents: bool) -> np.ndarray:
    """Return the token ids [n] of a prompt, after the start mark if it starts a document.

    Sub-words log a warning that names the words that the training text lacks.

    Raises UserError for an empty prompt if there is no start mark, and for a character that the model does not have.
    """
    ids = vocabulary.encode(prompt, 'prompt')
    # Characters raise an error for an unknown one, and bytes keep no list of those in the training text.
    if isinstance(vocabulary, SubwordTokenizer):
        warn_of_unknown_words(vocabulary.vocabulary, prompt.split('\n'))
    marks = vocabulary.marks if documents else None
    if not len(ids) and (prompt or marks is None):  # a prompt of invisible characters has no sub-words
        raise UserError('the prompt is empty; expected some text to continue')
    return ids if marks is None else np.concatenate([[marks[0]], ids])


def _check_memory(model: LanguageModel, params: Params, samples: int, length: int) -> None:
    """Raise UserError if `samples` texts of `length` tokens and their caches do not fit into memory."""
    row_cache = jax.eval_shape(lambda params: cache.init_cache(model, params, 1, model.config.context), params)
    cache_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(row_cache))
    # The cache before and after a step, and float32 logits, also twice.
    device_bytes = samples * (2 * cache_bytes + 8 * model.vocabulary)
    text_bytes = samples * 40 * length  # a list of Python integers: 8 bytes for a pointer and 32 for an integer
    host_memory, device = environment.host_memory_bytes(), jax.local_devices()[0]
    if device.platform == 'cpu':
        available, needed = host_memory, device_bytes + text_bytes
    else:
        available, needed = (device.memory_stats() or {}).get('bytes_limit', host_memory), device_bytes
    if needed > available or text_bytes > host_memory:
        raise UserError(
            f'{samples} samples of {length} tokens take about {max(needed, text_bytes):.2g} bytes; this machine has '
            f'{min(available, host_memory):.2g}; expected fewer samples or tokens'
        )


def build_sampler(
    model: LanguageModel, end: int | None, temperature: float, top_k: int | None, top_p: float | None
) -> Callable[..., SampleResult]:
    """Return a function that samples a continuation of windows of text; it is compiled once for each batch size.

    The function has the arguments (params, windows [B, context] int32, token_mask [B, context] bool, key, max_new):
    token_mask is True for the tokens of a window, False for padding; at most `max_new` tokens are sampled for each row.
    end: id of the token that ends a row; None: no token does.
    """

    @jax.jit
    def sample_continuation(
        params: Params, windows: jax.Array, token_mask: jax.Array, rng: jax.Array, max_new: jax.Array
    ) -> SampleResult:
        empty = cache.init_cache(model, params, windows.shape[0], model.config.context)
        state, first = cache.prefill(model, params, empty, windows, token_mask)
        return sample_tokens(
            cache.make_decode_step(model, params), state, first, rng=rng,
            max_tokens=model.config.context, dynamic_max_tokens=max_new,
            eos_id=end, temperature=temperature, top_k=top_k, top_p=top_p,
        )  # fmt: skip

    return sample_continuation


def _window(text: list[int], context: int) -> list[int]:
    """Return the ids that the model reads: the whole text, or if it exceeds the context, the last half of a context."""
    return text if len(text) <= context else text[-max(1, context // 2) :]


def _pad_windows(windows: list[list[int]], width: int) -> tuple[jax.Array, jax.Array]:
    """Return ids [B, width] int32 and a mask [B, width] bool that is True for ids and False for padding."""
    tokens, token_mask = np.zeros((len(windows), width), np.int32), np.zeros((len(windows), width), bool)
    for row, window in enumerate(windows):
        tokens[row, : len(window)], token_mask[row, : len(window)] = window, True
    return jnp.asarray(tokens), jnp.asarray(token_mask)
