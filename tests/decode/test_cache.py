"""Decoding with a cache, compared with passes over all tokens without a cache."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.configs import LanguageModelConfig
from attnlab.decode.beam import beam_search
from attnlab.decode.cache import extend_cache, init_cache, make_decode_step, prefill
from attnlab.decode.sampling import check_decoded_tokens, sample_tokens
from attnlab.errors import RunError
from attnlab.models.language import LanguageModel
from tests.quick import QUICK

V, D, L, B, T, CONTEXT, MAX_LENGTH = 11, 8, 2, 3, 7, 16, 9
TODAY = dict(heads=4, kv_heads=2, qk_norm='rms', positions='rotary', norm='rms', mlp='swiglu', use_bias=False)


def make_model(positions='none', vocabulary=V, **fields):
    plain = dict(layers=L, width=D, heads=2, context=CONTEXT, positions=positions, tied=False, scan=True)
    return LanguageModel(vocabulary, LanguageModelConfig(**plain | fields))


MODELS = {
    'learned': make_model('learned', scan=False),
    'today': make_model(**TODAY),
    'l2, window': make_model('learned', qk_norm='l2', window=2),
    'alibi, sinks': make_model('alibi', sinks=True),
    'relative, parallel': make_model('relative', parallel=True),
    'sinusoidal, post': make_model('sinusoidal', order='post', mlp='relu'),
    'experts': make_model('learned', experts=4, experts_per_token=2),
    'convolution': make_model(mixer='convolution', kernel_size=3, scan=False),
    'gru': make_model(mixer='gru'),
    'lstm': make_model(mixer='lstm'),
}
ONE_OF_EACH_STATE = ['learned', 'convolution', 'lstm']  # keys and values, past inputs, a recurrent state
TOKENS = np.random.default_rng(0).integers(0, V, (B, T), np.int32)
# Padding on the left, on the right and in between: the rows have 5, 3 and 4 real tokens, so 2, 4 and 3 follow.
TOKEN_MASK = np.array([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0], [1, 0, 0, 1, 1, 0, 1]], bool)
LENGTHS = TOKEN_MASK.sum(1).tolist()


def random_parameters(model):
    """Return random parameters, including biases, and norm scales around one."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)['params']
    random = np.random.default_rng(1)
    mean = lambda path: float(path[-1].key == 'scale')
    draw = lambda path, x: (mean(path) + 0.4 * random.normal(size=x.shape)).astype(x.dtype)
    return jax.tree.map_with_path(draw, shapes)


class CompiledModel:
    """A model with random parameters, an empty cache, and compiled calls with and without a cache on NumPy arrays."""

    def __init__(self, model, max_length=MAX_LENGTH):
        self.model, self.params = model, random_parameters(model)
        self.empty = jax.device_get(init_cache(model, self.params, B, max_length))
        forward = lambda params, tokens: model.apply({'params': params}, tokens)[0]
        extend = lambda params, *args: extend_cache(model, params, *args)
        self._forward, self._extend = (jax.jit(function, compiler_options=QUICK) for function in (forward, extend))

    def forward(self, tokens=TOKENS):
        """Return the logits of one pass without a cache."""
        return np.asarray(self._forward(self.params, tokens))

    def extend(self, cache, tokens, token_mask=None):
        """Return the results of `extend_cache`."""
        return jax.device_get(self._extend(self.params, cache, tokens, token_mask))


@functools.cache
def compiled(name):
    return CompiledModel(MODELS[name])


@functools.cache
def expected_logits(name):
    """Return the logits of one pass over all tokens."""
    return compiled(name).forward()


def pad_rows(token_mask, rows, seed=0):
    """Return tokens [B, T]: each row at its real tokens, and random ids, also outside the vocabulary, in padding."""
    tokens = np.random.default_rng(seed).integers(-9, 2 * V, token_mask.shape).astype(np.int32)
    for b, row in enumerate(rows):
        tokens[b, token_mask[b]] = row
    return tokens


FIRST = [row[:n] for row, n in zip(TOKENS, LENGTHS, strict=True)]
REST = [row[n:] for row, n in zip(TOKENS, LENGTHS, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize('name', MODELS)
def test_calls_of_any_size_give_the_logits_of_one_pass(name):
    """Calls of one token are the steps of decoding: step t gives row t of the logits."""
    for split in ((T,), (3, 1, 3), (1,) * T, *[(4, 0, 3)] * (name in ONE_OF_EACH_STATE)):
        cache, parts = compiled(name).empty, []
        for end, size in zip(np.cumsum(split), split, strict=True):
            tokens, token_mask = TOKENS[:, end - size : end], None
            if split != (4, 0, 3) and size > 1:  # padded to one size, to compile one program only
                tokens = np.pad(tokens, ((0, 0), (0, T - size)))
                token_mask = np.arange(T)[None] < np.full((B, 1), size)
            cache, logits = compiled(name).extend(cache, tokens, token_mask)
            parts.append(logits[:, :size])
        np.testing.assert_allclose(np.concatenate(parts, axis=1), expected_logits(name), atol=1e-5)
        assert cache.length.tolist() == [T] * B


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('name', MODELS)
def test_padding_has_no_effect(name):
    """Two calls with rows of unequal length, padded on the left, on the right and in between."""
    cache, parts = compiled(name).empty, []
    for token_mask, rows, lengths in ((TOKEN_MASK, FIRST, LENGTHS), (~TOKEN_MASK, REST, [T] * B)):
        results = []
        for padding_seed in (0, 1):
            results.append(compiled(name).extend(cache, pad_rows(token_mask, rows, padding_seed), token_mask))
        (cache, logits), (other_cache, other_logits) = results
        jax.tree.map(np.testing.assert_array_equal, cache, other_cache)
        np.testing.assert_array_equal(logits[token_mask], other_logits[token_mask])
        assert cache.length.tolist() == lengths
        parts.append([logits[b, token_mask[b]] for b in range(B)])
    for b in range(B):
        row_logits = np.concatenate([parts[0][b], parts[1][b]])
        np.testing.assert_allclose(row_logits, expected_logits(name)[b], atol=1e-5)
    unchanged, _ = compiled(name).extend(cache, TOKENS, np.zeros_like(TOKEN_MASK))
    jax.tree.map(np.testing.assert_array_equal, unchanged, cache)


@pytest.mark.parametrize('name', MODELS)
def test_a_row_does_not_depend_on_the_rest_of_the_batch(name):
    """Bit for bit, for other tokens and other padding in the other rows."""
    extend = lambda token_mask, rows: compiled(name).extend(
        compiled(name).empty, pad_rows(token_mask, rows, 5), token_mask
    )
    cache, logits = extend(TOKEN_MASK, FIRST)
    for b in range(B):
        token_mask = np.roll(~TOKEN_MASK, 1, axis=0)
        token_mask[b] = TOKEN_MASK[b]
        rows = [np.arange(n) for n in token_mask.sum(1)]
        rows[b] = FIRST[b]
        other_cache, other_logits = extend(token_mask, rows)
        np.testing.assert_array_equal(other_logits[b, token_mask[b]], logits[b, token_mask[b]])
        # Of keys and values, only those of tokens are compared.
        row = lambda x: x[b][: LENGTHS[b]] if x.ndim == 4 else x[b]  # noqa: B023
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(row(x), row(y)), other_cache, cache)  # noqa: B023


@pytest.mark.slow
def test_a_padded_row_of_a_batch_equals_the_row_alone_without_padding():
    model = compiled('today')
    _, logits = model.extend(model.empty, pad_rows(TOKEN_MASK, FIRST), TOKEN_MASK)
    for b in range(B):
        alone = model.forward(FIRST[b][None])[0]
        np.testing.assert_allclose(logits[b, TOKEN_MASK[b]], alone, atol=1e-5)


@pytest.mark.parametrize('name', ['today', 'experts', *ONE_OF_EACH_STATE])
def test_logits_beyond_a_full_cache_are_nan_and_other_rows_are_not_affected(name):
    """Row 0 has room for 4 tokens and gets 7; the others have room, also for one token more.  The call is compiled."""
    model, token_mask, rows = compiled(name), ~TOKEN_MASK, [[*REST[0], 1, 2, 3, 4, 5], *REST[1:]]
    token_mask[0] = True
    cache, _ = model.extend(model.empty, pad_rows(TOKEN_MASK, FIRST), TOKEN_MASK)
    cache_with_room, expected = model.extend(cache, pad_rows(~TOKEN_MASK, REST), ~TOKEN_MASK)
    full_cache, logits = model.extend(cache, pad_rows(token_mask, rows), token_mask)
    np.testing.assert_allclose(logits[0, :2], expected_logits(name)[0, 5:], atol=1e-5)
    assert np.all(np.isfinite(logits[0, :4])) and np.all(np.isnan(logits[0, 4:]))
    assert np.all(np.isfinite(logits[1:][token_mask[1:]]))
    np.testing.assert_array_equal(logits[1:][token_mask[1:]], expected[1:][token_mask[1:]])
    next_token = np.arange(B, dtype=np.int32)[:, None]
    _, next_logits = model.extend(full_cache, next_token)
    _, expected_next = model.extend(cache_with_room, next_token)
    assert np.all(np.isnan(next_logits[0])) and np.all(np.isfinite(next_logits[1:]))
    np.testing.assert_array_equal(next_logits[1:], expected_next[1:])


def test_a_call_that_does_not_fit_in_the_cache_raises_with_its_lengths():
    model, params = MODELS['learned'], compiled('learned').params
    cache = dataclasses.replace(init_cache(model, params, B, MAX_LENGTH), length=np.array([2, MAX_LENGTH, 3]))
    room = f'the cache has room for {MAX_LENGTH} tokens in a row; '
    with pytest.raises(ValueError, match=f'{room}row 2 holds 3 tokens, and 7 more were given'):
        extend_cache(model, params, dataclasses.replace(cache, length=np.array([2, 0, 3])), TOKENS)
    step = make_decode_step(model, params)
    extend_by_one = lambda: extend_cache(model, params, cache, TOKENS[:, :1])
    for call in (extend_by_one, lambda: step(cache, jnp.zeros(B, int))):
        with pytest.raises(ValueError, match=f'{room}row 1 holds {MAX_LENGTH} tokens, and 1 more'):
            call()


def test_the_maximum_length_is_at_least_one_and_at_most_the_learned_positions():
    shapes = lambda name, max_length: jax.eval_shape(
        lambda: init_cache(MODELS[name], compiled(name).params, B, max_length)
    )
    with pytest.raises(ValueError, match='max_length is 0; expected at least 1'):
        shapes('today', 0)
    with pytest.raises(ValueError, match='max_length is 17; expected at most 16, the learned positions of the model'):
        shapes('learned', CONTEXT + 1)
    assert shapes('learned', CONTEXT).max_length == CONTEXT
    assert shapes('sinusoidal, post', CONTEXT + 1).max_length == CONTEXT + 1


def decode_without_cache(name, prompts, max_tokens):
    """Return the most probable tokens after each prompt, each from a pass over all tokens before it."""
    tokens = np.zeros((B, T + max_tokens), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    for t in range(max_tokens):
        logits = compiled(name).forward(tokens)
        for b, prompt in enumerate(prompts):
            tokens[b, len(prompt) + t] = np.argmax(logits[b, len(prompt) + t - 1])
    return [row[len(prompt) : len(prompt) + max_tokens].tolist() for row, prompt in zip(tokens, prompts, strict=True)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('name', ['today', 'convolution', 'lstm'])
def test_sampling_at_temperature_zero_equals_decoding_without_a_cache(name):
    """Prompts have unequal lengths and any padding."""
    model, params, max_tokens = MODELS[name], compiled(name).params, 6

    @functools.partial(jax.jit, compiler_options=QUICK)
    def decode(params, cache, prompts, token_mask):
        state, first = prefill(model, params, cache, prompts, token_mask)
        settings = {'rng': jax.random.key(0), 'max_tokens': max_tokens, 'temperature': 0}
        return state.length, first, sample_tokens(make_decode_step(model, params), state, first, **settings).tokens

    cache = init_cache(model, params, B, T + max_tokens)
    length, first, tokens = decode(params, cache, pad_rows(TOKEN_MASK, FIRST), TOKEN_MASK)
    assert first.tolist() == [row[-1] for row in FIRST] and length.tolist() == [n - 1 for n in LENGTHS]
    assert tokens.tolist() == decode_without_cache(name, FIRST, max_tokens)
    assert len({token for row in tokens.tolist() for token in row}) > 1


def test_one_program_decodes_200_tokens_for_all_prompts():
    model, max_tokens = MODELS['today'], 200
    params = compiled('today').params
    traces = []

    @functools.partial(jax.jit, compiler_options=QUICK)
    def decode(params, prompts, token_mask, rng):
        traces.append(prompts.shape)
        cache = init_cache(model, params, B, T + max_tokens)
        state, first = prefill(model, params, cache, prompts, token_mask)
        step = make_decode_step(model, params)
        return sample_tokens(step, state, first, rng=rng, max_tokens=max_tokens, temperature=0.5).tokens

    first_tokens = decode(params, pad_rows(TOKEN_MASK, FIRST), TOKEN_MASK, jax.random.key(0))
    second_tokens = decode(params, pad_rows(~TOKEN_MASK, REST), ~TOKEN_MASK, jax.random.key(1))
    assert traces == [(B, T)] and decode._cache_size() == 1
    assert first_tokens.shape == second_tokens.shape == (B, max_tokens) and jnp.any(first_tokens != second_tokens)


@pytest.mark.slow
def test_beam_search_with_a_cache_equals_brute_force():
    """V = 4, three tokens: all 40 hypotheses, scored without a cache, for prompts of unequal length."""
    small, max_tokens, eos_id = CompiledModel(make_model(**TODAY, vocabulary=4), T + 3), 3, 2
    prompts = [row % 4 for row in FIRST]
    sequences = list(itertools.product(range(4), repeat=max_tokens))

    @functools.partial(jax.jit, compiler_options=QUICK)
    def search(params, cache, prompts, token_mask):
        state, first = prefill(small.model, params, cache, prompts, token_mask)
        step = make_decode_step(small.model, params)
        return beam_search(step, state, first, beams=40, max_tokens=max_tokens, eos_id=eos_id)

    found = search(small.params, small.empty, pad_rows(TOKEN_MASK, prompts), TOKEN_MASK)
    for b, prompt in enumerate(prompts):
        rows = np.zeros((len(sequences), T + max_tokens), np.int32)
        rows[:, : len(prompt)] = prompt
        rows[:, len(prompt) : len(prompt) + max_tokens] = sequences
        log_p = jax.nn.log_softmax(jnp.asarray(small.forward(rows))[:, len(prompt) - 1 :])
        scores = {}
        for sequence, sequence_log_p in zip(sequences, np.asarray(log_p), strict=True):
            hypothesis = sequence[: sequence.index(eos_id) + 1] if eos_id in sequence else sequence
            scores[hypothesis] = sum(float(sequence_log_p[t, token]) for t, token in enumerate(hypothesis))
        best = sorted(scores, key=lambda hypothesis: -scores[hypothesis])
        assert len(best) == 40 and found.lengths[b].tolist() == [len(hypothesis) for hypothesis in best]
        assert found.tokens[b].tolist() == [[*hypothesis] + [0] * (max_tokens - len(hypothesis)) for hypothesis in best]
        np.testing.assert_allclose(found.scores[b], [scores[hypothesis] for hypothesis in best], atol=1e-5)


def test_a_full_cache_ends_a_row_with_the_invalid_token():
    """The cache has room for 64 tokens; with prompts of 60, 50 and 60, the rows have room for 5, 15 and 5 more."""
    model, params = MODELS['today'], compiled('today').params
    prompts = jnp.asarray(np.random.default_rng(0).integers(0, V, (B, 60), np.int32))
    token_mask = np.arange(60)[None] < np.array([[60], [50], [60]])

    @functools.partial(jax.jit, compiler_options=QUICK)
    def decode(params):
        state, first = prefill(model, params, init_cache(model, params, B, 64), prompts, token_mask)
        return sample_tokens(make_decode_step(model, params), state, first, rng=jax.random.key(0), max_tokens=20)

    tokens, lengths = decode(params)
    assert lengths.tolist() == [5, 15, 5]
    for row, n in zip(np.asarray(tokens), (5, 15, 5), strict=True):
        assert np.all((row[:n] >= 0) & (row[:n] < V)) and row[n] == -1 and np.all(row[n + 1 :] == 0)
    with pytest.raises(RunError, match='row 0: the logits of token 5 are .* the cache has no room for more tokens'):
        check_decoded_tokens(tokens)


def test_beam_search_with_a_full_cache_has_no_hypotheses():
    """Rows 0, 1 and 2 have room for 5, 7 and 6 tokens; 6 are decoded."""
    model, params = MODELS['today'], compiled('today').params

    @functools.partial(jax.jit, compiler_options=QUICK)
    def search(params, cache, prompts, token_mask):
        state, first = prefill(model, params, cache, prompts, token_mask)
        return beam_search(make_decode_step(model, params), state, first, beams=2, max_tokens=6, eos_id=V)

    found = search(params, compiled('today').empty, pad_rows(TOKEN_MASK, FIRST), TOKEN_MASK)
    assert np.all(np.isnan(found.scores[0])) and found.tokens[0, :, 0].tolist() == [-1, -1]
    assert np.all(np.isfinite(found.scores[1:])) and np.all(found.tokens[1:] >= 0) and np.all(found.lengths[1:] == 6)
