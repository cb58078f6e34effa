"""Decoding with a cache against whole passes over all tokens, which have none."""

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

V, D, L, B, T, CONTEXT, SLOTS = 11, 8, 2, 3, 7, 16, 9
TODAY = dict(heads=4, kv_heads=2, qk_norm='rms', positions='rotary', norm='rms', mlp='swiglu', use_bias=False)


def made(positions='none', vocabulary=V, **fields):
    plain = dict(layers=L, width=D, heads=2, context=CONTEXT, positions=positions, tied=False, scan=True)
    return LanguageModel(vocabulary, LanguageModelConfig(**plain | fields))


MODELS = {
    'learned': made('learned', scan=False),
    'today': made(**TODAY),
    'l2, window': made('learned', qk_norm='l2', window=2),
    'alibi, sinks': made('alibi', sinks=True),
    'relative, parallel': made('relative', parallel=True),
    'sinusoidal, post': made('sinusoidal', order='post', mlp='relu'),
    'experts': made('learned', experts=4, active=2),
    'convolution': made(mixer='convolution', taps=3, scan=False),
    'gru': made(mixer='gru'),
    'lstm': made(mixer='lstm'),
}
EACH_WAY = ['learned', 'convolution', 'lstm']  # of remembering
TOKENS = np.random.default_rng(0).integers(0, V, (B, T), np.int32)
# Real tokens on the right, on the left, and in between: 5, 3 and 4 of them.  The others are 2, 4 and 3.
REAL = np.array([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0], [1, 0, 0, 1, 1, 0, 1]], bool)
LENGTHS = REAL.sum(1).tolist()


def drawn(model):
    """Parameters, all drawn at random, biases and gains too, these around one."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)['params']
    random = np.random.default_rng(1)
    near = lambda path: float(path[-1].key == 'scale')
    return jax.tree.map_with_path(lambda at, x: (near(at) + 0.4 * random.normal(size=x.shape)).astype(x.dtype), shapes)


class Run:
    """A model with parameters: passes without a cache, an empty cache, and how it goes on; results are of NumPy."""

    def __init__(self, model, slots=SLOTS):
        self.model, self.params = model, drawn(model)
        self.empty = jax.device_get(init_cache(model, self.params, B, slots))
        passed = lambda params, tokens: model.apply({'params': params}, tokens)[0]
        more = lambda params, *args: extend_cache(model, params, *args)
        self._passed, self._more = (jax.jit(program, compiler_options=QUICK) for program in (passed, more))

    def whole(self, tokens=TOKENS):
        return np.asarray(self._passed(self.params, tokens))

    def extend(self, cache, tokens, real=None):
        return jax.device_get(self._more(self.params, cache, tokens, real))


@functools.cache
def run(name):
    return Run(MODELS[name])


@functools.cache
def whole(name):
    """The logits of one pass over all tokens."""
    return run(name).whole()


def placed(real, rows, garbage=0):
    """[B, T], the tokens of each row where `real` says, and in its padding tokens of any id, in the table or not."""
    tokens = np.random.default_rng(garbage).integers(-9, 2 * V, real.shape).astype(np.int32)
    for b, row in enumerate(rows):
        tokens[b, real[b]] = row
    return tokens


FIRST = [row[:n] for row, n in zip(TOKENS, LENGTHS, strict=True)]
REST = [row[n:] for row, n in zip(TOKENS, LENGTHS, strict=True)]


@pytest.mark.parametrize('name', MODELS)
def test_every_split_is_one_pass_over_all(name):
    """One token at a time is a cached decoding: its step t is row t of the whole."""
    for split in ((T,), (3, 1, 3), (1,) * T, *[(4, 0, 3)] * (name in EACH_WAY)):
        ends = np.cumsum(split)
        cache, found = run(name).empty, []
        for end, size in zip(ends, split, strict=True):
            tokens, real = TOKENS[:, end - size : end], None
            if split != (4, 0, 3) and size > 1:  # one program for many sizes
                tokens, real = np.pad(tokens, ((0, 0), (0, T - size))), np.arange(T)[None] < np.full((B, 1), size)
            cache, logits = run(name).extend(cache, tokens, real)
            found.append(logits[:, :size])
        np.testing.assert_allclose(np.concatenate(found, axis=1), whole(name), atol=1e-5)
        assert cache.length.tolist() == [T] * B


@pytest.mark.parametrize('name', MODELS)
def test_padding_anywhere_leaves_no_trace(name):
    """Rows of unequal length, padded on the left, on the right and between, are each as if alone; twice in a row."""
    cache, found = run(name).empty, []
    for real, rows, lengths in ((REAL, FIRST, LENGTHS), (~REAL, REST, [T] * B)):
        kept = {}
        for garbage in (0, 1):
            kept[garbage] = after, logits = run(name).extend(cache, placed(real, rows, garbage), real)
        jax.tree.map(np.testing.assert_array_equal, kept[0][0], kept[1][0])
        np.testing.assert_array_equal(kept[0][1][real], logits[real])
        assert after.length.tolist() == lengths
        cache = after
        found.append([logits[b, real[b]] for b in range(B)])
    for b in range(B):
        np.testing.assert_allclose(np.concatenate([found[0][b], found[1][b]]), whole(name)[b], atol=1e-5)
    nothing, _ = run(name).extend(cache, TOKENS, np.zeros_like(REAL))
    jax.tree.map(np.testing.assert_array_equal, nothing, cache)


@pytest.mark.parametrize('name', MODELS)
def test_batch_mates_change_nothing(name):
    """Bit for bit, whatever they say, and however they are padded."""
    extended = lambda real, rows: run(name).extend(run(name).empty, placed(real, rows, 5), real)
    cache, logits = extended(REAL, FIRST)
    for b in range(B):
        real = np.roll(~REAL, 1, axis=0)
        real[b] = REAL[b]
        rows = [np.arange(n) for n in real.sum(1)]
        rows[b] = FIRST[b]
        other, others = extended(real, rows)
        np.testing.assert_array_equal(others[b, real[b]], logits[b, real[b]])
        row = lambda x: x[b][: LENGTHS[b]] if x.ndim == 4 else x[b]  # noqa: B023  (slots not yet taken are the same)
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(row(x), row(y)), other, cache)  # noqa: B023


def test_rows_of_a_batch_are_each_alone_and_unpadded():
    model = run('today')
    _, logits = model.extend(model.empty, placed(REAL, FIRST), REAL)
    for b in range(B):
        alone = model.whole(FIRST[b][None])[0]
        np.testing.assert_allclose(logits[b, REAL[b]], alone, atol=1e-5)


@pytest.mark.parametrize('name', ['today', 'experts', *EACH_WAY])
def test_in_a_program_what_has_no_slot_is_nan_and_rows_with_room_do_not_see_it(name):
    """Row 0 has 4 slots left and sends 7 tokens; the others have room, then and one token later."""
    model, real, rows = run(name), ~REAL, [[*REST[0], 1, 2, 3, 4, 5], *REST[1:]]
    real[0] = True
    cache, _ = model.extend(model.empty, placed(REAL, FIRST), REAL)
    fits, expected = model.extend(cache, placed(~REAL, REST), ~REAL)
    full, logits = model.extend(cache, placed(real, rows), real)
    np.testing.assert_allclose(logits[0, :2], whole(name)[0, 5:], atol=1e-5)
    assert np.all(np.isfinite(logits[0, :4])) and np.all(np.isnan(logits[0, 4:]))
    one_more = lambda cache: model.extend(cache, np.arange(B, dtype=np.int32)[:, None])[1]
    (after, then), now = (one_more(cache) for cache in (full, fits)), np.isfinite(logits)
    assert np.all(np.isnan(after[0])) and np.all(now[1:][real[1:]]) and np.all(np.isfinite(after[1:]))
    np.testing.assert_array_equal(after[1:], then[1:])
    np.testing.assert_array_equal(logits[1:][real[1:]], expected[1:][real[1:]])


def test_a_full_cache_is_refused_with_its_slots_and_lengths():
    model, params = MODELS['learned'], run('learned').params
    held = dataclasses.replace(init_cache(model, params, B, SLOTS), length=np.array([2, SLOTS, 3]))
    with pytest.raises(ValueError, match=f'the cache has room for {SLOTS} tokens in a row; row 2 holds 3 tokens, and 7 more were given'):
        extend_cache(model, params, dataclasses.replace(held, length=np.array([2, 0, 3])), TOKENS)
    step = make_decode_step(model, params)
    for refused in (lambda: extend_cache(model, params, held, TOKENS[:, :1]), lambda: step(held, jnp.zeros(B, int))):
        with pytest.raises(ValueError, match=f'the cache has room for {SLOTS} tokens in a row; row 1 holds {SLOTS} tokens, and 1 more'):
            refused()


def test_slots_are_at_least_one_and_at_most_the_learned_positions():
    shapes = lambda name, slots: jax.eval_shape(lambda: init_cache(MODELS[name], run(name).params, B, slots))
    with pytest.raises(ValueError, match='max_length is 0; expected at least 1'):
        shapes('today', 0)
    with pytest.raises(ValueError, match='max_length is 17; expected at most 16, the learned positions of the model'):
        shapes('learned', CONTEXT + 1)
    assert shapes('learned', CONTEXT).max_length == CONTEXT
    assert shapes('sinusoidal, post', CONTEXT + 1).max_length == CONTEXT + 1


def most_probable(name, prompts, limit):
    """The most probable tokens, each from a pass over all before it."""
    said = np.zeros((B, T + limit), np.int32)
    for row, prompt in zip(said, prompts, strict=True):
        row[: len(prompt)] = prompt
    for t in range(limit):
        logits = run(name).whole(said)
        for b, prompt in enumerate(prompts):
            said[b, len(prompt) + t] = np.argmax(logits[b, len(prompt) + t - 1])
    return [row[len(prompt) : len(prompt) + limit].tolist() for row, prompt in zip(said, prompts, strict=True)]


@pytest.mark.parametrize('name', ['today', 'convolution', 'lstm'])
def test_sampling_at_temperature_zero_is_the_most_probable_of_each_pass(name):
    """From prompts of unequal length, padded anywhere."""
    model, params, limit = MODELS[name], run(name).params, 6

    @functools.partial(jax.jit, compiler_options=QUICK)
    def said(params, cache, prompts, real):
        state, first = prefill(model, params, cache, prompts, real)
        how = {'rng': jax.random.key(0), 'max_tokens': limit, 'temperature': 0}
        return state.length, first, sample_tokens(make_decode_step(model, params), state, first, **how).tokens

    length, first, found = said(params, init_cache(model, params, B, T + limit), placed(REAL, FIRST), REAL)
    assert first.tolist() == [row[-1] for row in FIRST] and length.tolist() == [n - 1 for n in LENGTHS]
    assert found.tolist() == most_probable(name, FIRST, limit)
    assert len({token for row in found.tolist() for token in row}) > 1


def test_200_tokens_are_one_program_whatever_the_prompt():
    model, limit = MODELS['today'], 200
    params = run('today').params
    traced = []

    @functools.partial(jax.jit, compiler_options=QUICK)
    def said(params, prompts, real, rng):
        traced.append(prompts.shape)
        state, first = prefill(model, params, init_cache(model, params, B, T + limit), prompts, real)
        return sample_tokens(
            make_decode_step(model, params), state, first, rng=rng, max_tokens=limit, temperature=0.5
        ).tokens

    one = said(params, placed(REAL, FIRST), REAL, jax.random.key(0))
    other = said(params, placed(~REAL, REST), ~REAL, jax.random.key(1))
    assert traced == [(B, T)] and said._cache_size() == 1
    assert one.shape == other.shape == (B, limit) and jnp.any(one != other)


def test_beam_search_with_a_cache_is_brute_force():
    """V = 4, three tokens: all 40 hypotheses there are, scored by whole passes, from prompts of unequal length."""
    small, limit, end = Run(made(**TODAY, vocabulary=4), T + 3), 3, 2
    prompts = [row % 4 for row in FIRST]
    tokens = list(itertools.product(range(4), repeat=limit))

    @functools.partial(jax.jit, compiler_options=QUICK)
    def searched(params, cache, prompts, real):
        state, first = prefill(small.model, params, cache, prompts, real)
        return beam_search(make_decode_step(small.model, params), state, first, beams=40, max_tokens=limit, eos_id=end)

    found = searched(small.params, small.empty, placed(REAL, prompts), REAL)
    for b, prompt in enumerate(prompts):
        rows = np.zeros((len(tokens), T + limit), np.int32)
        rows[:, : len(prompt)] = prompt
        rows[:, len(prompt) : len(prompt) + limit] = tokens
        each = jax.nn.log_softmax(jnp.asarray(small.whole(rows))[:, len(prompt) - 1 :])
        scores = {}
        for said, log_p in zip(tokens, np.asarray(each), strict=True):
            said = said[: said.index(end) + 1] if end in said else said
            scores[said] = sum(float(log_p[t, token]) for t, token in enumerate(said))
        best = sorted(scores, key=lambda said: -scores[said])
        assert len(best) == 40 and found.lengths[b].tolist() == [len(said) for said in best]
        assert found.tokens[b].tolist() == [[*said] + [0] * (limit - len(said)) for said in best]
        np.testing.assert_allclose(found.scores[b], [scores[said] for said in best], atol=1e-5)


def test_a_decoding_stops_where_its_cache_is_full_and_says_so():
    """64 slots, prompts of 60, 50 and 60 tokens: rows 0 and 2 have room for 5 tokens more, row 1 for 15."""
    model, params = MODELS['today'], run('today').params
    prompts = jnp.asarray(np.random.default_rng(0).integers(0, V, (B, 60), np.int32))
    real = np.arange(60)[None] < np.array([[60], [50], [60]])

    @functools.partial(jax.jit, compiler_options=QUICK)
    def said(params):
        state, first = prefill(model, params, init_cache(model, params, B, 64), prompts, real)
        return sample_tokens(make_decode_step(model, params), state, first, rng=jax.random.key(0), max_tokens=20)

    tokens, lengths = said(params)
    assert lengths.tolist() == [5, 15, 5]
    for row, n in zip(np.asarray(tokens), (5, 15, 5), strict=True):
        assert np.all((row[:n] >= 0) & (row[:n] < V)) and row[n] == -1 and np.all(row[n + 1 :] == 0)
    with pytest.raises(RunError, match='row 0: the logits of token 5 are .* the cache has no room for more tokens'):
        check_decoded_tokens(tokens)


def test_a_beam_search_whose_cache_is_full_has_no_hypotheses():
    model, params = MODELS['today'], run('today').params

    @functools.partial(jax.jit, compiler_options=QUICK)
    def searched(params, cache, prompts, real):
        state, first = prefill(model, params, cache, prompts, real)
        return beam_search(make_decode_step(model, params), state, first, beams=2, max_tokens=6, eos_id=V)

    found = searched(params, run('today').empty, placed(REAL, FIRST), REAL)  # rows 0, 1, 2 have room for 5, 7, 6
    assert np.all(np.isnan(found.scores[0])) and found.tokens[0, :, 0].tolist() == [-1, -1]
    assert np.all(np.isfinite(found.scores[1:])) and np.all(found.tokens[1:] >= 0) and np.all(found.lengths[1:] == 6)
