"""Sampling, with tables of logits in place of a model."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.decode import sampling
from attnlab.decode.greedy import greedy_search
from attnlab.decode.sampling import sample_tokens
from attnlab.errors import RunError, UserError
from tests.quick import QUICK

V, BOS, EOS = 6, 2, 3
keep_top_k = jax.jit(sampling.keep_top_k, static_argnums=1, compiler_options=QUICK)
keep_top_p = jax.jit(sampling.keep_top_p, static_argnums=1, compiler_options=QUICK)


def random_tables(batch, seed=0, eos_bonus=0.0, size=V):
    """Return random logits [B, V, V] of the next token by the previous one."""
    logits = np.random.default_rng(seed).normal(size=(batch, size, size)).astype(np.float32)
    logits[:, :, EOS] += eos_bonus
    return jnp.asarray(logits)


def step(state, previous):
    """A step for `greedy_search` too: the third result, which sampling ignores, is attention weights."""
    logits = state[jnp.arange(previous.shape[0]), previous]
    return state, logits, jnp.zeros((previous.shape[0], 0))


STATIC = ('max_tokens', 'eos_id', 'temperature', 'top_k', 'top_p')


@functools.partial(jax.jit, static_argnames=STATIC, compiler_options=QUICK)
def decode(state, rng, max_tokens=8, **settings):
    """Run `sample_tokens` on tables."""
    return sample_tokens(step, state, jnp.full(state.shape[0], BOS), rng=rng, max_tokens=max_tokens, **settings)


def softmax(logits):
    e = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return e / e.sum()


def expected_probabilities(logits, temperature=1.0, top_k=None, top_p=None):
    """Return the probabilities of the tokens by the definitions, for logits without ties."""
    p = softmax(np.asarray(logits, np.float64) / temperature)
    if top_k is not None:
        p = np.where(p >= np.sort(p)[-min(top_k, len(p))], p, 0)
        p = p / p.sum()
    if top_p is not None:
        nucleus = smallest_set(p, top_p)
        p = np.where([v in nucleus for v in range(len(p))], p, 0)
        p = p / p.sum()
    return p


def smallest_set(p, threshold):
    """Return the smallest set of tokens whose probability reaches `threshold`; among equal sizes, the most probable."""
    for size in range(1, len(p) + 1):
        best = max(itertools.combinations(range(len(p)), size), key=lambda tokens: p[list(tokens)].sum())
        if p[list(best)].sum() >= threshold or size == len(p):
            return best


def assert_drawn_from(counts, p):
    """Assert that Pearson's chi-square is within 5 standard deviations of its mean, and no token of probability 0 is
    drawn."""
    assert np.all(counts[p == 0] == 0)
    counts, p = counts[p > 0], p[p > 0]
    degrees = len(p) - 1
    chi_square = np.sum((counts - counts.sum() * p) ** 2 / (counts.sum() * p))
    assert chi_square <= degrees + 5 * np.sqrt(2 * degrees), (chi_square, counts, counts.sum() * p)


SETTINGS = [
    {},
    {'temperature': 0.5},
    {'temperature': 3.0, 'top_k': 3},
    {'top_p': 0.8},
    {'temperature': 2.0, 'top_k': 4, 'top_p': 0.7},
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('settings', SETTINGS, ids=str)
def test_tokens_have_the_probabilities_of_the_definition(settings):
    """4,000 rows of one table, 5 tokens each, so that every token follows every other."""
    table = random_tables(1, seed=3)
    tokens, lengths = decode(jnp.broadcast_to(table, (4000, V, V)), jax.random.key(0), max_tokens=5, **settings)
    assert tokens.dtype == lengths.dtype == jnp.int32 and jnp.all(lengths == 5)
    sequences = np.concatenate([np.full((4000, 1), BOS), np.asarray(tokens)], axis=1)
    tested = 0
    for previous in range(V):
        following = sequences[:, 1:][sequences[:, :-1] == previous]
        p = expected_probabilities(table[0, previous], **settings)
        if len(following) * p[p > 0].min() > 5:  # with fewer, the statistic has no chi-square distribution
            assert_drawn_from(np.bincount(following, minlength=V), p)
            tested += 1
    assert tested >= 3


@pytest.mark.parametrize('rng', [jax.random.key(1), jax.random.PRNGKey(1)], ids=['typed', 'raw'])
def test_draws_of_steps_and_rows_are_independent(rng):
    tokens = np.asarray(decode(jnp.zeros((1000, V, V)), rng).tokens)
    uniform = np.full(V * V, 1 / V**2)
    assert_drawn_from(np.bincount((tokens[:, :-1] * V + tokens[:, 1:]).ravel(), minlength=V * V), uniform)
    assert_drawn_from(np.bincount((tokens[:-1] * V + tokens[1:]).ravel(), minlength=V * V), uniform)
    assert np.any(tokens != decode(jnp.zeros((1000, V, V)), jax.random.key(2)).tokens)


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_rest_of_the_batch():
    state, settings = random_tables(12, eos_bonus=0.5), {'eos_id': EOS, 'temperature': 1.5, 'top_k': 5, 'top_p': 0.9}
    rng = jax.random.key(4)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.arange(12))
    together = decode(state, rng, **settings)
    assert len(set(together.lengths.tolist())) > 3
    for b in range(12):
        alone = decode(state[b : b + 1], keys[b : b + 1], **settings)
        jax.tree.map(lambda a, x: np.testing.assert_array_equal(a[0], x[b]), alone, together)  # noqa: B023
    among_others = decode(random_tables(12, seed=9).at[4].set(state[4]), rng, **settings)
    assert among_others.tokens[4].tolist() == together.tokens[4].tolist()
    reversed_rows = decode(state[::-1], keys[::-1], **settings)
    np.testing.assert_array_equal(reversed_rows.tokens[::-1], together.tokens)


def test_zeros_follow_the_first_eos_of_a_row():
    tokens, lengths = decode(random_tables(60, eos_bonus=0.5), jax.random.key(5), eos_id=EOS)
    # The same draws, without an end at EOS.
    without_eos = decode(random_tables(60, eos_bonus=0.5), jax.random.key(5)).tokens
    for b in range(60):
        row = without_eos[b].tolist()
        expected = row[: row.index(EOS) + 1] if EOS in row else row
        assert tokens[b].tolist() == expected + [0] * (8 - len(expected))
        assert lengths[b] == len(expected)
    assert {1, 2, 3, 8} <= set(lengths.tolist())


def test_without_eos_id_each_row_has_max_tokens_tokens():
    tokens, lengths = decode(random_tables(3, eos_bonus=99.0), jax.random.key(0), max_tokens=5)
    assert tokens.tolist() == [[EOS] * 5] * 3 and lengths.tolist() == [5] * 3


@pytest.mark.parametrize('eos_id, expected_steps', [(EOS, 1), (None, 7)])
def test_the_loop_stops_when_all_rows_have_ended(eos_id, expected_steps):
    steps = []

    def counting_step(state, previous):
        jax.debug.callback(lambda _: steps.append(1), previous)
        return step(state, previous)

    run = jax.jit(
        lambda state, first, rng: sample_tokens(counting_step, state, first, rng=rng, max_tokens=7, eos_id=eos_id),
        compiler_options=QUICK,
    )
    jax.block_until_ready(run(random_tables(3, eos_bonus=99.0), jnp.full(3, BOS), jax.random.key(0)))
    jax.effects_barrier()
    assert len(steps) == expected_steps


def test_temperature_zero_is_greedy():
    state = jnp.round(random_tables(50, eos_bonus=0.5))  # rounding makes many ties
    tokens, lengths = decode(state, jax.random.key(0), temperature=0, top_k=4, top_p=0.5, eos_id=EOS)
    search = lambda state: greedy_search(step, state, 50, bos_id=BOS, eos_id=EOS, max_tokens=8).tokens
    want = np.asarray(jax.jit(search, compiler_options=QUICK)(state))
    np.testing.assert_array_equal(tokens, want)
    np.testing.assert_array_equal(lengths, np.where(np.any(want == EOS, 1), np.argmax(want == EOS, 1) + 1, 8))
    top_1 = decode(state, jax.random.key(0), top_k=1, eos_id=EOS)
    np.testing.assert_array_equal(top_1.tokens, want, err_msg='top_k=1 breaks ties as temperature 0 does')


@pytest.mark.parametrize('temperature', [1e-3, 1e-30, 1e-60])
def test_a_temperature_near_zero_gives_no_nan(temperature):
    state = 1e4 * random_tables(20)
    tokens = decode(state, jax.random.key(0), temperature=temperature).tokens
    np.testing.assert_array_equal(tokens, decode(state, jax.random.key(0), temperature=0).tokens)
    tied = jnp.broadcast_to(jnp.array([-1.0, 0.0, 0.0, -1.0, -2.0, 0.0]), state.shape)
    assert set(np.ravel(decode(tied, jax.random.key(0), temperature=temperature).tokens)) == {1, 2, 5}


def test_the_first_token_is_the_first_input_and_state_is_carried():
    """Each token is the previous one plus the number of steps so far."""

    def counting_step(count, previous):
        return count + 1, 99 * jax.nn.one_hot((previous + count) % V, V)

    program = lambda state, first, rng: sample_tokens(counting_step, state, first, rng=rng, max_tokens=4)
    run = jax.jit(program, compiler_options=QUICK)
    tokens, _ = run(jnp.array([0, 1]), jnp.array([1, 4]), jax.random.key(0))
    assert tokens.tolist() == [[1, 2, 4, 1], [5, 1, 4, 2]]


def test_bfloat16_logits_are_drawn_in_float32():
    """512 equal logits; in bfloat16, softmax and noise would tie, and most tokens would never be drawn."""
    wide = jnp.zeros((40, 512, 512), jnp.bfloat16)
    tokens = np.asarray(decode(wide, jax.random.key(0), max_tokens=50, top_p=0.999).tokens)
    assert_drawn_from(np.bincount(tokens.ravel() // 64, minlength=8), np.full(8, 1 / 8))


def test_one_program_serves_all_tables_and_keys():
    traces = []

    def traced_step(state, previous):
        traces.append(previous.shape)
        return step(state, previous)

    settings = dict(max_tokens=8, top_k=4, eos_id=EOS)
    program = lambda state, first, rng: sample_tokens(traced_step, state, first, rng=rng, **settings).tokens
    run = jax.jit(program, compiler_options=QUICK)
    first_tokens = run(random_tables(3), jnp.full(3, BOS), jax.random.key(0))
    count = len(traces)
    second_tokens = run(random_tables(3, seed=1), jnp.full(3, 1), jax.random.key(1))
    assert len(traces) == count and run._cache_size() == 1 and jnp.any(first_tokens != second_tokens)


@pytest.mark.parametrize('k', [1, 2, 5, V, 99])
def test_top_k_keeps_the_k_largest(k):
    logits = np.random.default_rng(k).normal(size=(4, 3, V)).astype(np.float32)
    rank = np.argsort(np.argsort(-logits))
    np.testing.assert_array_equal(keep_top_k(jnp.asarray(logits), k), np.where(rank < k, logits, -np.inf))


def test_ties_of_top_k_go_to_the_lowest_token():
    inf = jnp.inf
    logits = jnp.array([[0.0, 1.0, 0.0, 0.0, -inf], [2.0, 2.0, 2.0, 2.0, 2.0], [-inf, -inf, 1.0, -inf, -inf]])
    want = [[0.0, 1.0, 0.0, -inf, -inf], [2.0, 2.0, 2.0, -inf, -inf], [-inf, -inf, 1.0, -inf, -inf]]
    assert keep_top_k(logits, 3).tolist() == want
    signs = jnp.array([-9.0, -0.0, -0.0, 0.0])
    assert keep_top_k(signs, 2).tolist() == keep_top_p(signs, 0.5).tolist() == [-inf, 0.0, 0.0, -inf]


@pytest.mark.parametrize('p', [1e-60, 0.2, 0.5, 0.9, 0.99])
def test_top_p_keeps_the_smallest_set_that_reaches_p(p):
    logits = 2 * np.random.default_rng(0).normal(size=(20, V)).astype(np.float32)
    kept = keep_top_p(jnp.asarray(logits).reshape(4, 5, V), p).reshape(20, V)
    sizes = set()
    for row, kept_row in zip(logits, kept, strict=True):
        want = smallest_set(softmax(row), p)
        assert kept_row.tolist() == [x if v in want else -np.inf for v, x in enumerate(row.tolist())]
        sizes.add(len(want))
    assert sizes == {1} if p < 0.5 else len(sizes) > 1


def test_top_p_keeps_a_set_that_reaches_p_exactly():
    halves = jnp.asarray(np.log([0.25, 0.5, 0.125, 0.125]), jnp.float32)
    count = lambda p, logits=halves: int(np.sum(np.asarray(keep_top_p(logits, p)) > -np.inf))
    assert [count(p) for p in (0.49, 0.51, 0.74, 0.76, 0.874, 0.876, 1.0)] == [1, 2, 2, 3, 3, 4, 4]
    assert count(0.5, jnp.zeros(4)) == 2  # 0.25 + 0.25 reaches 0.5 exactly
    assert keep_top_p(jnp.zeros(4), 0.6).tolist() == [0.0, 0.0, 0.0, -jnp.inf]  # ties go to the lowest
    assert count(1.0, jnp.array([90.0, 9.0, -90.0, -jnp.inf])) == 3  # every token of positive probability
    assert count(0.3, jnp.array([-jnp.inf, 0.0, -jnp.inf])) == 1
    assert count(0.75, jnp.zeros(1024, jnp.bfloat16)) == 768  # bfloat16 cannot represent the sums exactly


@pytest.mark.parametrize('keep', [lambda x: keep_top_k(x, 2), lambda x: keep_top_p(x, 0.5)], ids=['k', 'p'])
def test_filters_keep_the_dtype_and_the_values_of_kept_logits(keep):
    logits = random_tables(1)[0].astype(jnp.bfloat16)
    kept, logits = np.asarray(keep(logits)), np.asarray(logits)
    assert kept.dtype == logits.dtype
    assert np.all((kept == logits) | np.isneginf(kept)) and np.all(np.any(kept == logits, axis=-1))


@pytest.mark.parametrize(
    'settings, message',
    [
        ({'temperature': -0.1}, 'temperature is -0.1; expected a finite number, at least 0'),
        ({'temperature': float('nan')}, 'temperature is nan; expected a finite number, at least 0'),
        ({'temperature': float('inf')}, 'temperature is inf; expected a finite number, at least 0'),
        ({'top_k': 0}, 'top_k is 0; expected a whole number, at least 1'),
        ({'top_k': 2.5}, 'top_k is 2.5; expected a whole number, at least 1'),
        ({'top_p': 0.0}, 'top_p is 0.0; expected 0 < top_p <= 1'),
        ({'top_p': 1.1}, 'top_p is 1.1; expected 0 < top_p <= 1'),
        ({'top_p': float('nan')}, 'top_p is nan; expected 0 < top_p <= 1'),
        ({'max_tokens': 0}, 'max_tokens is 0; expected at least 1 token'),
        ({'temperature': 0, 'top_k': -1}, 'top_k is -1; expected a whole number, at least 1'),
    ],
    ids=str,
)
def test_settings_out_of_range_raise(settings, message):
    with pytest.raises(UserError) as error:
        sample_tokens(step, random_tables(2), jnp.zeros(2, int), rng=jax.random.key(0), **{'max_tokens': 3, **settings})
    assert str(error.value) == message


def test_wrong_filters_and_shapes_raise():
    with pytest.raises(UserError, match=r'^top_k is 0; expected'):
        keep_top_k(jnp.zeros(3), 0)
    with pytest.raises(UserError, match=r'^top_p is 0; expected'):
        keep_top_p(jnp.zeros(3), 0)
    with pytest.raises(ValueError, match=r'^first_tokens has shape \(\); expected \[B\]'):
        sample_tokens(step, random_tables(2), jnp.int32(0), rng=jax.random.key(0), max_tokens=3)
    with pytest.raises(ValueError, match=r'^rng holds keys of shape \(3,\); expected one key or \[B\] = \(2,\)'):
        keys = jax.random.split(jax.random.key(0), 3)
        sample_tokens(step, random_tables(2), jnp.zeros(2, int), rng=keys, max_tokens=3)


@pytest.mark.parametrize('settings', [{}, {'temperature': 0}, {'top_k': 3}, {'top_p': 0.9}], ids=str)
@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_invalid_logits_end_a_row_with_the_invalid_token(value, settings):
    """Row 1 has an invalid logit after its first token, row 2 at once; row 0 is as without them."""
    state = random_tables(3)
    valid = decode(state, jax.random.key(0), **settings)
    assert jnp.all(valid.lengths == 8)
    first_token = int(valid.tokens[1, 0])
    assert first_token != BOS
    state = state.at[1, first_token, 4].set(value).at[2, BOS, 0].set(value)
    tokens, lengths = decode(state, jax.random.key(0), **settings)
    assert tokens[0].tolist() == valid.tokens[0].tolist()
    assert tokens[1:].tolist() == [[first_token, -1, 0, 0, 0, 0, 0, 0], [-1, 0, 0, 0, 0, 0, 0, 0]]
    assert lengths.tolist() == [8, 1, 0]
    with pytest.raises(RunError, match='row 1: the logits of token 1 are NaN or infinite'):
        sampling.check_decoded_tokens(tokens)
    sampling.check_decoded_tokens(valid.tokens)


def test_a_row_is_invalid_only_if_all_its_logits_are_minus_infinity():
    state = random_tables(2).at[0, :, 3:].set(-jnp.inf).at[1].set(-jnp.inf)
    tokens, lengths = decode(state, jax.random.key(0))
    assert lengths.tolist() == [8, 0] and tokens[1].tolist() == [-1] + [0] * 7
    assert jnp.all(tokens[0] < 3) and jnp.all(tokens[0] >= 0)


def test_numpy_numbers_work_as_python_numbers():
    state, rng = random_tables(4), jax.random.key(0)
    numbers = dict(max_tokens=5, eos_id=EOS, top_k=3, temperature=0.5, top_p=0.75)
    kinds = dict(max_tokens=np.int64, eos_id=np.int32, top_k=np.uint8, temperature=np.float32, top_p=np.float64)
    result = decode(state, rng, **{name: kinds[name](number) for name, number in numbers.items()})
    jax.tree.map(np.testing.assert_array_equal, result, decode(state, rng, **numbers))
    np.testing.assert_array_equal(keep_top_k(state, np.int64(2)), keep_top_k(state, 2))
    with pytest.raises(UserError, match='top_k is 0; expected'):
        keep_top_k(state, np.int64(0))
