"""Beam search, with tables of logits in place of a model."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.decode.beam import beam_search
from attnlab.decode.greedy import greedy_search
from attnlab.decode.sampling import check_decoded_tokens
from attnlab.errors import RunError, UserError
from tests.quick import QUICK

a, b, E = 0, 1, 2


def markov(state, previous):
    """A step for a state [B, V, V]: logits by the previous token.  The third result is attention weights [B, 0]."""
    return state, state[jnp.arange(previous.shape[0]), previous], jnp.zeros((previous.shape[0], 0))


def tree(state, previous):
    """A step whose logits depend on all previous tokens: node 0 is the empty sequence; token v leads from node n to
    node n V + 1 + v."""
    logits, node = state
    V = logits.shape[2]
    node = jnp.where(node < 0, 0, node * V + 1 + previous)
    return (logits, node), logits[jnp.arange(previous.shape[0]), node]


STATIC = ('beams', 'max_tokens', 'eos_id', 'length_penalty')


@functools.partial(jax.jit, static_argnames=('step', *STATIC), compiler_options=QUICK)
def _program(step, state, first, **settings):
    return beam_search(step, state, first, **settings)


def decode(step, state, first=0, **settings):
    """Run `beam_search`; `first` is the first token of all rows."""
    return jax.device_get(_program(step, state, np.full(len(jax.tree.leaves(state)[0]), first), **settings))


def random_trees(batch, V, max_tokens, seed=0, eos_bonus=0.0):
    """Return the state of `tree` with random logits.  In the first half of the rows, the logits depend on the last
    token only."""
    random = np.random.default_rng(seed)
    logits = 1.5 * random.normal(size=(batch, sum(V**depth for depth in range(max_tokens)), V))
    for row in logits[: batch // 2]:
        row[1:] = np.tile(row[1 : 1 + V], (len(row) // V, 1))  # the last token of node n is (n - 1) % V
    logits[:, :, E] += eos_bonus
    return jnp.asarray(logits, jnp.float32), jnp.full(batch, -1)


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def log_probability(table, tokens):
    """Return the log-probability of a sequence, from a tree of log-probabilities."""
    node, log_p = 0, 0.0
    for token in tokens:
        log_p += table[node][token]
        node = node * table.shape[1] + 1 + token
    return log_p


def every_hypothesis(table, max_tokens, alpha):
    """Return (score, tokens) of every sequence up to its first E, or of `max_tokens` tokens, best first."""
    V = table.shape[1]
    sequences = [s for n in range(1, max_tokens + 1) for s in itertools.product(range(V), repeat=n)]
    hypotheses = [s for s in sequences if E not in s[:-1] and (s[-1] == E or len(s) == max_tokens)]
    return sorted(((log_probability(table, s) / len(s) ** alpha, s) for s in hypotheses), reverse=True)


def beam_search_in_lists(table, beams, max_tokens, alpha):
    """Search as the docstring of `beam_search` describes, in Python lists and without an early stop."""
    live, pool = [()], []
    for _ in range(max_tokens):
        candidates = [s + (v,) for s in live for v in range(table.shape[1])]
        candidates.sort(key=lambda s: -log_probability(table, s))
        pool += [s for s in candidates[:beams] if s[-1] == E]
        live = [s for s in candidates if s[-1] != E][:beams]
    scored = [(log_probability(table, s) / len(s) ** alpha, s) for s in pool + live]
    return sorted(scored, reverse=True)[:beams]


def assert_hypotheses(found, row, expected, beams, max_tokens):
    """Assert that the hypotheses of a row are the first `beams` of `expected`, a list of (score, tokens)."""
    expected = expected[:beams]
    missing = beams - len(expected)
    padded = [list(s) + [0] * (max_tokens - len(s)) for _, s in expected] + [[0] * max_tokens] * missing
    assert found.tokens[row].tolist() == padded
    assert found.lengths[row].tolist() == [len(s) for _, s in expected] + [0] * missing
    scores = [score for score, _ in expected]
    np.testing.assert_allclose(found.scores[row, : len(expected)], scores, rtol=1e-5, atol=1e-6)
    assert np.all(found.scores[row, len(expected) :] == -np.inf)


PROBABILITIES = np.full((4, 3), 1e-9)  # by the previous token; 3 is the first
PROBABILITIES[3] = 0.6, 0.4, 1e-9
PROBABILITIES[a] = 0.34, 0.33, 0.33
PROBABILITIES[b] = 0.05, 0.05, 0.9


def state_of(table):
    """Return a table of probabilities [N, V] as the state of one row, padded to [1, N, N]."""
    wide = np.full((1, len(table), len(table)), -np.inf)
    with np.errstate(divide='ignore'):
        wide[0, :, : table.shape[1]] = np.log(table)
    return jnp.asarray(wide, jnp.float32)


def test_two_beams_find_a_sequence_that_greedy_search_misses():
    """The first token of the most probable sequence is not the most probable first token."""
    state = state_of(PROBABILITIES)
    assert greedy_tokens(state, 3, 2)[0, 0] == a
    tokens, scores, lengths = decode(markov, state, 3, beams=2, max_tokens=2, eos_id=E)
    assert tokens[0, 0].tolist() == [b, E] and lengths[0, 0] == 2
    np.testing.assert_allclose(np.exp(scores[0]), [0.36, 0.6 * 0.34], rtol=1e-5)
    assert tokens[0, 1].tolist() == [a, a]  # probability 0.204, without E; "a E" has 0.198
    more = decode(markov, state, 3, beams=9, max_tokens=2, eos_id=E)
    beam = more.tokens[0].tolist().index([a, E])
    np.testing.assert_allclose(np.exp(more.scores[0, beam]), 0.198, rtol=1e-5)


def short_and_long_sequences():
    """Return a table whose most probable sequences are a E (log P = -1.0) and b c d E (-1.2), and these sequences.

    The tokens are a b E c d e f, and 7, the first one.
    """
    c, d = 3, 4
    table = np.zeros((8, 8))
    table[7, a], table[7, b] = np.exp(-1.0), np.exp(-1.2)
    table[7, 5:7] = (1 - table[7].sum()) / 2
    table[a, E] = table[b, c] = table[c, d] = table[d, E] = 1.0
    table[5:7] = 1 / 8
    table[E] = 1 / 8  # not used
    return table, [a, E], [b, c, d, E]


def test_length_penalty_chooses_between_short_and_long():
    table, short, long = short_and_long_sequences()
    state = state_of(table)
    plain = decode(markov, state, 7, beams=2, max_tokens=6, eos_id=E)
    assert plain.tokens[0, 0, :2].tolist() == short and plain.lengths[0, :2].tolist() == [2, 4]
    np.testing.assert_allclose(plain.scores[0, :2], [-1.0, -1.2], rtol=1e-5)
    divided = decode(markov, state, 7, beams=2, max_tokens=6, eos_id=E, length_penalty=1.0)
    assert divided.tokens[0, 0, :4].tolist() == long and divided.lengths[0, :2].tolist() == [4, 2]
    np.testing.assert_allclose(divided.scores[0, :2], [-0.3, -0.5], rtol=1e-5)


def test_one_beam_is_greedy_search_on_100_random_tables():
    logits = np.random.default_rng(0).normal(size=(100, 6, 6)).astype(np.float32)
    logits[:, :, E] += 0.5
    state = jnp.asarray(logits)
    found = decode(markov, state, 5, beams=1, max_tokens=8, eos_id=E)
    want = greedy_tokens(state, 5, 8)
    np.testing.assert_array_equal(found.tokens[:, 0], want)
    lengths = np.where(np.any(want == E, 1), np.argmax(want == E, 1) + 1, 8)
    np.testing.assert_array_equal(found.lengths[:, 0], lengths)
    assert {1, 2, 3, 8} <= set(lengths.tolist())


@pytest.mark.parametrize('alpha', [0.0, 0.7, 1.0, 2.5])
def test_as_many_beams_as_sequences_find_all_hypotheses(alpha):
    """V = 3, 3 tokens, 27 beams: the hypotheses are those of a brute-force search, in the same order."""
    state = random_trees(12, V=3, max_tokens=3)
    found = decode(tree, state, beams=27, max_tokens=3, eos_id=E, length_penalty=alpha)
    winners = set()
    for row in range(12):
        want = every_hypothesis(log_softmax(state[0][row]), 3, alpha)
        assert len(want) == 15 and abs(sum(np.exp(s * len(t) ** alpha) for s, t in want) - 1) < 1e-9
        assert_hypotheses(found, row, want, 27, 3)
        winners.add(len(want[0][1]))
    assert len(winners) > 1


@pytest.mark.parametrize('alpha, beams', [(0.0, 1), (0.0, 3), (0.6, 2), (1.0, 1), (1.0, 4)])
def test_few_beams_find_the_hypotheses_of_the_search_in_lists(alpha, beams):
    """Logits depend on all previous tokens, so a state that is gathered for the wrong beam changes the result."""
    state = random_trees(16, V=4, max_tokens=5, seed=beams, eos_bonus=0.7)
    found = decode(tree, state, beams=beams, max_tokens=5, eos_id=E, length_penalty=alpha)
    lengths = set()
    for row in range(16):
        want = beam_search_in_lists(log_softmax(state[0][row]), beams, 5, alpha)
        assert_hypotheses(found, row, want, beams, 5)
        lengths |= {len(s) for _, s in want}
    assert len(lengths) > 2


def test_a_score_is_the_log_probability_divided_by_the_length():
    state = random_trees(8, V=4, max_tokens=5, seed=7)
    found = decode(tree, state, beams=4, max_tokens=5, eos_id=E, length_penalty=1.0)
    for row in range(8):
        table = log_softmax(state[0][row])
        for tokens, score, n in zip(*(x[row].tolist() for x in found), strict=True):
            assert n == (tokens.index(E) + 1 if E in tokens else 5)
            np.testing.assert_allclose(score, log_probability(table, tokens[:n]) / n, rtol=1e-5)
        assert found.scores[row].tolist() == sorted(found.scores[row].tolist(), reverse=True)
        assert len({tuple(s) for s in found.tokens[row].tolist()}) == 4


def test_a_row_does_not_depend_on_the_rest_of_the_batch():
    settings = {'beams': 3, 'max_tokens': 5, 'eos_id': E, 'length_penalty': 0.6}
    logits, node = random_trees(8, V=4, max_tokens=5, seed=5, eos_bonus=1.5)
    logits = logits.at[3, :, E].add(99.0).at[6, :, E].add(-99.0)  # one row ends at once, one never
    together = decode(tree, (logits, node), **settings)
    for row in range(8):
        alone = decode(tree, (logits[row : row + 1], node[:1]), **settings)
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y[row]), alone, together)  # noqa: B023
    reversed_rows = decode(tree, (logits[::-1], node), **settings)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[::-1], y), reversed_rows, together)


def greedy_tokens(state, first, max_tokens):
    """Return the tokens of `greedy_search`."""
    search = lambda state: greedy_search(
        markov, state, len(state), bos_id=first, eos_id=E, max_tokens=max_tokens
    ).tokens  # fmt: skip
    return np.asarray(jax.jit(search, compiler_options=QUICK)(state))


def count_steps(state, first, **settings):
    """Return the number of steps that `beam_search` takes, and its result."""
    steps = []

    def counting_step(state, previous):
        jax.debug.callback(lambda _: steps.append(1), previous)
        return markov(state, previous)

    search = lambda state: beam_search(counting_step, state, jnp.full(len(state), first), eos_id=E, **settings)
    found = jax.block_until_ready(jax.jit(search, compiler_options=QUICK)(state))
    jax.effects_barrier()
    return len(steps), jax.device_get(found)


def test_stops_when_no_live_hypothesis_can_win():
    """One hypothesis ends at once with P = 0.6.  The live one has log P = log 0.4, and 0.1 less with each token.

    Without a penalty it can no longer win.  With a penalty, the search continues while its log P divided by the penalty
    of 20 tokens is above log 0.6.
    """
    table = np.zeros((4, 4))
    table[3, E], table[3, a] = 0.6, 0.4
    table[a, a], table[a, E] = np.exp(-0.1), 1 - np.exp(-0.1)
    table[b] = table[E] = 0.25  # not used
    steps, found = count_steps(state_of(table), 3, beams=1, max_tokens=20)
    assert steps == 1 and found.tokens[0, 0, 0] == E
    # After t tokens, log P is log 0.4 - 0.1 (t - 1).  Divided by 20 ** 0.5, it is above log 0.6 up to t = 14.
    log_p = [np.log(0.4) - 0.1 * (t - 1) for t in range(1, 21)]
    want = next(t for t, x in enumerate(log_p, 1) if x / 20**0.5 <= np.log(0.6))
    steps, found = count_steps(state_of(table), 3, beams=1, max_tokens=20, length_penalty=0.5)
    assert steps == want == 15
    assert found.tokens[0, 0, 0] == E and found.lengths[0, 0] == 1


def test_stops_when_no_hypothesis_is_live():
    """E has probability 1: the pool is not full, and no hypothesis is left to fill it."""
    table = np.zeros((4, 4))
    table[:, E] = 1.0
    steps, found = count_steps(state_of(table), 3, beams=3, max_tokens=50)
    assert steps == 1
    assert found.tokens[0].tolist() == [[E] + [0] * 49] + [[0] * 50] * 2
    assert found.scores[0].tolist() == [0.0, -np.inf, -np.inf] and found.lengths[0].tolist() == [1, 0, 0]


def test_hypotheses_without_eos_have_max_tokens_tokens():
    table = np.full((4, 4), 0.3)
    table[:, E] = 0.0
    table[:, a] = 0.4
    found = decode(markov, state_of(table), 3, beams=2, max_tokens=4, eos_id=E, length_penalty=1.0)
    assert found.tokens[0, 0].tolist() == [a] * 4 and found.lengths.tolist() == [[4, 4]]
    np.testing.assert_allclose(found.scores[0, 0], np.log(0.4), rtol=1e-5)


def test_ties_go_to_the_first_finished_then_to_the_lowest_token():
    tied = jnp.zeros((1, 4, 4))
    assert decode(markov, tied, 3, beams=2, max_tokens=2, eos_id=3).tokens[0].tolist() == [[0, 0], [0, 1]]
    # With scores divided by the length all are equal, so the hypothesis that finished first is first.
    finished = decode(markov, tied, 3, beams=2, max_tokens=3, eos_id=0, length_penalty=1.0)
    assert finished.tokens[0].tolist() == [[0, 0, 0], [1, 0, 0]] and finished.lengths[0].tolist() == [1, 2]


@pytest.mark.parametrize('V', [1, 2])
def test_the_vocabulary_may_be_smaller_than_the_number_of_candidates(V):
    found = decode(markov, jnp.zeros((2, V, V)), beams=3, max_tokens=2, eos_id=0)
    want = [[0, 0], [1, 0], [1, 1]][: 2 * V - 1]
    assert found.tokens[0].tolist() == want + [[0, 0]] * (3 - len(want))
    assert found.lengths[0].tolist() == [1, 2, 2][: len(want)] + [0] * (3 - len(want))


def test_bfloat16_logits_are_summed_in_float32():
    state = random_trees(4, V=4, max_tokens=5, seed=2)
    half = state[0].astype(jnp.bfloat16)
    found = decode(tree, (half, state[1]), beams=2, max_tokens=5, eos_id=E)
    assert found.scores.dtype == jnp.float32
    for row in range(4):
        assert_hypotheses(found, row, beam_search_in_lists(log_softmax(half[row].astype(jnp.float32)), 2, 5, 0.0), 2, 5)


def test_one_program_serves_all_tables():
    traces = []

    def traced_step(state, previous):
        traces.append(previous.shape)
        return markov(state, previous)

    search = lambda state, first: beam_search(traced_step, state, first, beams=2, max_tokens=6, eos_id=E).tokens
    run = jax.jit(search, compiler_options=QUICK)
    first_tokens = run(jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 4))), jnp.zeros(3, int))
    count = len(traces)
    second_tokens = run(jnp.asarray(np.random.default_rng(1).normal(size=(3, 4, 4))), jnp.ones(3, int))
    assert len(traces) == count and run._cache_size() == 1 and jnp.any(first_tokens != second_tokens)
    assert set(traces) == {(6,)}


@pytest.mark.parametrize(
    'settings, message',
    [
        ({'beams': 0}, 'beams is 0; expected at least 1'),
        ({'max_tokens': 0}, 'max_tokens is 0; expected at least 1'),
        ({'length_penalty': -0.5}, 'length_penalty is -0.5; expected a finite number, at least 0'),
        ({'length_penalty': float('nan')}, 'length_penalty is nan; expected a finite number, at least 0'),
    ],
    ids=str,
)
def test_settings_out_of_range_raise(settings, message):
    settings = {'beams': 2, 'max_tokens': 3, 'eos_id': E, **settings}
    with pytest.raises(UserError) as error:
        beam_search(markov, jnp.zeros((2, 4, 4)), jnp.zeros(2, int), **settings)
    assert str(error.value) == message


def test_wrong_shapes_raise():
    search = lambda state, first: beam_search(markov, state, first, beams=2, max_tokens=3, eos_id=E)
    with pytest.raises(ValueError, match=r"^state\['at'\] has shape \(\); expected the batch axis first, of 2 rows$"):
        search({'at': jnp.int32(0), 'keys': jnp.zeros((2, 4))}, jnp.zeros(2, int))
    with pytest.raises(ValueError, match=r'^first_tokens has shape \(\); expected \[B\], one token a row$'):
        search(jnp.zeros((2, 4, 4)), jnp.int32(0))


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_a_row_with_invalid_logits_has_no_hypotheses(value):
    """Row 1 has an invalid logit at once, row 2 after token 1, where one of its beams is; row 0 is as without them."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 4)), jnp.float32)
    settings = {'beams': 3, 'max_tokens': 4, 'eos_id': 3, 'length_penalty': 1.0}
    valid = decode(markov, logits, **settings)
    assert np.all(np.isfinite(valid.scores))
    found = decode(markov, logits.at[1, 0, 2].set(value).at[2, 1, 0].set(value), **settings)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y[0]), found, valid)
    assert found.tokens[1:, :, 0].tolist() == [[-1] * 3] * 2 and np.all(found.tokens[1:, :, 1:] == 0)
    assert np.all(np.isnan(found.scores[1:])) and np.all(found.lengths[1:] == 0)
    with pytest.raises(RunError, match='row 1: the logits of token 0 are NaN or infinite'):
        check_decoded_tokens(found.tokens)


def test_logits_that_no_hypothesis_reaches_may_be_nan():
    """Token 1 has probability 0, so the logits after it have no effect."""
    logits = jnp.zeros((1, 3, 3)).at[:, :, 1].set(-jnp.inf)
    settings = {'beams': 4, 'max_tokens': 3, 'eos_id': 2}
    found, valid = (decode(markov, x, **settings) for x in (logits.at[:, 1].set(jnp.nan), logits))
    jax.tree.map(np.testing.assert_array_equal, found, valid)
    assert valid.lengths.tolist() == [[1, 2, 3, 3]]


def test_numpy_integers_work_as_python_integers():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 4)), jnp.float32)
    settings = {'beams': 2, 'max_tokens': 3, 'eos_id': 3}
    found = decode(markov, logits, **{name: np.int64(number) for name, number in settings.items()})
    jax.tree.map(np.testing.assert_array_equal, found, decode(markov, logits, **settings))
