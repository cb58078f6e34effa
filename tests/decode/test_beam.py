"""Beam search over tables of probabilities in place of a model."""

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
    """The next token's logits by the previous one, from state [B, V, V]; the third result is attention to nothing."""
    return state, state[jnp.arange(previous.shape[0]), previous], jnp.zeros((previous.shape[0], 0))


def tree(state, previous):
    """The next token's logits by all that was said: node 0 is nothing said, node n's child of v is n V + 1 + v."""
    logits, node = state
    V = logits.shape[2]
    node = jnp.where(node < 0, 0, node * V + 1 + previous)
    return (logits, node), logits[jnp.arange(previous.shape[0]), node]


HOW = ('beams', 'max_tokens', 'eos_id', 'length_penalty')


@functools.partial(jax.jit, static_argnames=('step', *HOW), compiler_options=QUICK)
def _program(step, state, first, **how):
    return beam_search(step, state, first, **how)


def decode(step, state, first=0, **how):
    return jax.device_get(_program(step, state, np.full(len(jax.tree.leaves(state)[0]), first), **how))


def trees(batch, V, limit, seed=0, end=0.0):
    """A random tree for every row, the first half of them Markov: what comes next depends on the last token alone."""
    random = np.random.default_rng(seed)
    logits = 1.5 * random.normal(size=(batch, sum(V**depth for depth in range(limit)), V))
    for row in logits[: batch // 2]:
        row[1:] = np.tile(row[1 : 1 + V], (len(row) // V, 1))  # node n's token is (n - 1) % V
    logits[:, :, E] += end
    return jnp.asarray(logits, jnp.float32), jnp.full(batch, -1)


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def log_probability(table, said):
    """Of a sequence, from a tree of log-probabilities."""
    node, total = 0, 0.0
    for token in said:
        total += table[node][token]
        node = node * table.shape[1] + 1 + token
    return total


def every_hypothesis(table, limit, alpha):
    """(score, tokens) of every sequence up to its first E, or of `limit` tokens, best first."""
    V = table.shape[1]
    strings = [s for n in range(1, limit + 1) for s in itertools.product(range(V), repeat=n)]
    ended = [s for s in strings if E not in s[:-1] and (s[-1] == E or len(s) == limit)]
    return sorted(((log_probability(table, s) / len(s) ** alpha, s) for s in ended), reverse=True)


def searched(table, beams, limit, alpha):
    """The search as its docstring tells it, in lists, and never done before the limit."""
    live, pool = [()], []
    for _ in range(limit):
        longer = [s + (v,) for s in live for v in range(table.shape[1])]
        longer.sort(key=lambda s: -log_probability(table, s))
        pool += [s for s in longer[:beams] if s[-1] == E]
        live = [s for s in longer if s[-1] != E][:beams]
    scored = [(log_probability(table, s) / len(s) ** alpha, s) for s in pool + live]
    return sorted(scored, reverse=True)[:beams]


def assert_found(found, row, want, beams, limit):
    """These are the hypotheses of the row, in this order, and nothing but them."""
    want = want[:beams]
    said = [list(s) + [0] * (limit - len(s)) for _, s in want] + [[0] * limit] * (beams - len(want))
    assert found.tokens[row].tolist() == said
    assert found.lengths[row].tolist() == [len(s) for _, s in want] + [0] * (beams - len(want))
    np.testing.assert_allclose(found.scores[row, : len(want)], [score for score, _ in want], rtol=1e-5, atol=1e-6)
    assert np.all(found.scores[row, len(want) :] == -np.inf)


HAND = np.full((4, 3), 1e-9)  # by the previous token, which is 3 at first
HAND[3] = 0.6, 0.4, 1e-9
HAND[a] = 0.34, 0.33, 0.33
HAND[b] = 0.05, 0.05, 0.9


def hand(table):
    """A table of probabilities as the state of one row, padded to as many tokens as there are rows."""
    wide = np.full((1, len(table), len(table)), -np.inf)
    with np.errstate(divide='ignore'):
        wide[0, :, : table.shape[1]] = np.log(table)
    return jnp.asarray(wide, jnp.float32)


def test_the_hand_table():
    """Greedy takes the likelier first token and pays for it."""
    state = hand(HAND)
    assert by_greedy(state, 3, 2)[0, 0] == a
    tokens, scores, lengths = decode(markov, state, 3, beams=2, max_tokens=2, eos_id=E)
    assert tokens[0, 0].tolist() == [b, E] and lengths[0, 0] == 2
    np.testing.assert_allclose(np.exp(scores[0]), [0.36, 0.6 * 0.34], rtol=1e-5)
    assert tokens[0, 1].tolist() == [a, a]  # 0.204, cut; "a E" has 0.198
    more = decode(markov, state, 3, beams=9, max_tokens=2, eos_id=E)
    at = more.tokens[0].tolist().index([a, E])
    np.testing.assert_allclose(np.exp(more.scores[0, at]), 0.198, rtol=1e-5)


def short_and_long():
    """Tokens a b E c d e f, and 7 that starts: a E has log P = -1.0, b c d E has -1.2, all else is spread thin."""
    c, d = 3, 4
    table = np.zeros((8, 8))
    table[7, a], table[7, b] = np.exp(-1.0), np.exp(-1.2)
    table[7, 5:7] = (1 - table[7].sum()) / 2
    table[a, E] = table[b, c] = table[c, d] = table[d, E] = 1.0
    table[5:7] = 1 / 8
    table[E] = 1 / 8  # never read
    return table, [a, E], [b, c, d, E]


def test_length_penalty_chooses_between_short_and_long():
    table, short, long = short_and_long()
    state = hand(table)
    plain = decode(markov, state, 7, beams=2, max_tokens=6, eos_id=E)
    assert plain.tokens[0, 0, :2].tolist() == short and plain.lengths[0, :2].tolist() == [2, 4]
    np.testing.assert_allclose(plain.scores[0, :2], [-1.0, -1.2], rtol=1e-5)
    divided = decode(markov, state, 7, beams=2, max_tokens=6, eos_id=E, length_penalty=1.0)
    assert divided.tokens[0, 0, :4].tolist() == long and divided.lengths[0, :2].tolist() == [4, 2]
    np.testing.assert_allclose(divided.scores[0, :2], [-0.3, -0.5], rtol=1e-5)


def test_one_beam_is_greedy_on_100_random_tables():
    logits = np.random.default_rng(0).normal(size=(100, 6, 6)).astype(np.float32)
    logits[:, :, E] += 0.5
    state = jnp.asarray(logits)
    found = decode(markov, state, 5, beams=1, max_tokens=8, eos_id=E)
    want = by_greedy(state, 5, 8)
    np.testing.assert_array_equal(found.tokens[:, 0], want)
    lengths = np.where(np.any(want == E, 1), np.argmax(want == E, 1) + 1, 8)
    np.testing.assert_array_equal(found.lengths[:, 0], lengths)
    assert {1, 2, 3, 8} <= set(lengths.tolist())


@pytest.mark.parametrize('alpha', [0.0, 0.7, 1.0, 2.5])
def test_as_many_beams_as_sequences_find_them_all(alpha):
    """V = 3, L = 3, 27 beams: every hypothesis there is, by brute force, in its order."""
    state = trees(12, V=3, limit=3)
    found = decode(tree, state, beams=27, max_tokens=3, eos_id=E, length_penalty=alpha)
    winners = set()
    for row in range(12):
        want = every_hypothesis(log_softmax(state[0][row]), 3, alpha)
        assert len(want) == 15 and abs(sum(np.exp(s * len(t) ** alpha) for s, t in want) - 1) < 1e-9
        assert_found(found, row, want, 27, 3)
        winners.add(len(want[0][1]))
    assert len(winners) > 1


@pytest.mark.parametrize('alpha, beams', [(0.0, 1), (0.0, 3), (0.6, 2), (1.0, 1), (1.0, 4)])
def test_narrow_beams_equal_the_search_in_lists(alpha, beams):
    """Of sequences that depend on all that was said, so that a state in the wrong place shows."""
    state = trees(16, V=4, limit=5, seed=beams, end=0.7)
    found = decode(tree, state, beams=beams, max_tokens=5, eos_id=E, length_penalty=alpha)
    lengths = set()
    for row in range(16):
        want = searched(log_softmax(state[0][row]), beams, 5, alpha)
        assert_found(found, row, want, beams, 5)
        lengths |= {len(s) for _, s in want}
    assert len(lengths) > 2


def test_a_score_is_the_log_probability_by_the_length_once():
    state = trees(8, V=4, limit=5, seed=7)
    found = decode(tree, state, beams=4, max_tokens=5, eos_id=E, length_penalty=1.0)
    for row in range(8):
        table = log_softmax(state[0][row])
        for tokens, score, n in zip(*(x[row].tolist() for x in found), strict=True):
            assert n == (tokens.index(E) + 1 if E in tokens else 5)
            np.testing.assert_allclose(score, log_probability(table, tokens[:n]) / n, rtol=1e-5)
        assert found.scores[row].tolist() == sorted(found.scores[row].tolist(), reverse=True)
        assert len({tuple(s) for s in found.tokens[row].tolist()}) == 4


def test_batch_mates_change_nothing():
    how = {'beams': 3, 'max_tokens': 5, 'eos_id': E, 'length_penalty': 0.6}
    logits, node = trees(8, V=4, limit=5, seed=5, end=1.5)
    logits = logits.at[3, :, E].add(99.0).at[6, :, E].add(-99.0)  # one ends at once, one never
    together = decode(tree, (logits, node), **how)
    for row in range(8):
        alone = decode(tree, (logits[row : row + 1], node[:1]), **how)
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y[row]), alone, together)  # noqa: B023
    turned = decode(tree, (logits[::-1], node), **how)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[::-1], y), turned, together)


def by_greedy(state, first, limit):
    rows = len(state)
    said = lambda state: greedy_search(markov, state, rows, bos_id=first, eos_id=E, max_tokens=limit).tokens
    return np.asarray(jax.jit(said, compiler_options=QUICK)(state))


def steps_taken(state, first, **how):
    taken = []

    def noted(state, previous):
        jax.debug.callback(lambda _: taken.append(1), previous)
        return markov(state, previous)

    search = lambda state: beam_search(noted, state, jnp.full(len(state), first), eos_id=E, **how)
    found = jax.block_until_ready(jax.jit(search, compiler_options=QUICK)(state))
    jax.effects_barrier()
    return len(taken), jax.device_get(found)


def test_stops_when_no_live_hypothesis_can_win():
    """One beam ends at once with P = 0.6.  What lives has log P = log 0.4, and 0.1 less a token: without a penalty it
    is too late for it; with one, its bound log 0.4 / 20 holds the search until 20 tokens cannot save it."""
    table = np.zeros((4, 4))
    table[3, E], table[3, a] = 0.6, 0.4
    table[a, a], table[a, E] = np.exp(-0.1), 1 - np.exp(-0.1)
    table[b] = table[E] = 0.25  # never read
    steps, found = steps_taken(hand(table), 3, beams=1, max_tokens=20)
    assert steps == 1 and found.tokens[0, 0, 0] == E
    # Live after t tokens: log 0.4 - 0.1 (t - 1).  Over 20 ** 0.5 that is above log 0.6 up to t = 14.
    bound = [np.log(0.4) - 0.1 * (t - 1) for t in range(1, 21)]
    want = next(t for t, x in enumerate(bound, 1) if x / 20**0.5 <= np.log(0.6))
    steps, found = steps_taken(hand(table), 3, beams=1, max_tokens=20, length_penalty=0.5)
    assert steps == want == 15
    assert found.tokens[0, 0, 0] == E and found.lengths[0, 0] == 1


def test_stops_when_nothing_lives():
    """Certain to end: the pool is never full, and nothing is left to fill it."""
    table = np.zeros((4, 4))
    table[:, E] = 1.0
    steps, found = steps_taken(hand(table), 3, beams=3, max_tokens=50)
    assert steps == 1
    assert found.tokens[0].tolist() == [[E] + [0] * 49] + [[0] * 50] * 2
    assert found.scores[0].tolist() == [0.0, -np.inf, -np.inf] and found.lengths[0].tolist() == [1, 0, 0]


def test_what_never_ends_is_cut_at_the_limit():
    table = np.full((4, 4), 0.3)
    table[:, E] = 0.0
    table[:, a] = 0.4
    found = decode(markov, hand(table), 3, beams=2, max_tokens=4, eos_id=E, length_penalty=1.0)
    assert found.tokens[0, 0].tolist() == [a] * 4 and found.lengths.tolist() == [[4, 4]]
    np.testing.assert_allclose(found.scores[0, 0], np.log(0.4), rtol=1e-5)


def test_ties_go_to_the_earlier_then_to_the_lowest_token():
    flat = jnp.zeros((1, 4, 4))
    assert decode(markov, flat, 3, beams=2, max_tokens=2, eos_id=3).tokens[0].tolist() == [[0, 0], [0, 1]]
    # With division by the length all score alike: the one that ended first is first.
    first_ends = decode(markov, flat, 3, beams=2, max_tokens=3, eos_id=0, length_penalty=1.0)
    assert first_ends.tokens[0].tolist() == [[0, 0, 0], [1, 0, 0]] and first_ends.lengths[0].tolist() == [1, 2]


@pytest.mark.parametrize('V', [1, 2])
def test_fewer_tokens_than_candidates(V):
    found = decode(markov, jnp.zeros((2, V, V)), beams=3, max_tokens=2, eos_id=0)
    want = [[0, 0], [1, 0], [1, 1]][: 2 * V - 1]
    assert found.tokens[0].tolist() == want + [[0, 0]] * (3 - len(want))
    assert found.lengths[0].tolist() == [1, 2, 2][: len(want)] + [0] * (3 - len(want))


def test_bfloat16_logits_are_summed_in_float32():
    state = trees(4, V=4, limit=5, seed=2)
    half = state[0].astype(jnp.bfloat16)
    found = decode(tree, (half, state[1]), beams=2, max_tokens=5, eos_id=E)
    assert found.scores.dtype == jnp.float32
    for row in range(4):
        assert_found(found, row, searched(log_softmax(half[row].astype(jnp.float32)), 2, 5, 0.0), 2, 5)


def test_compiles_once():
    traced = []

    def noted(state, previous):
        traced.append(previous.shape)
        return markov(state, previous)

    search = lambda state, first: beam_search(noted, state, first, beams=2, max_tokens=6, eos_id=E).tokens
    run = jax.jit(search, compiler_options=QUICK)
    one = run(jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 4))), jnp.zeros(3, int))
    count = len(traced)
    other = run(jnp.asarray(np.random.default_rng(1).normal(size=(3, 4, 4))), jnp.ones(3, int))
    assert len(traced) == count and run._cache_size() == 1 and jnp.any(one != other)
    assert set(traced) == {(6,)}


@pytest.mark.parametrize(
    'how, message',
    [
        ({'beams': 0}, 'beams is 0; expected at least 1'),
        ({'max_tokens': 0}, 'max_tokens is 0; expected at least 1'),
        ({'length_penalty': -0.5}, 'length_penalty is -0.5; expected a finite number, at least 0'),
        ({'length_penalty': float('nan')}, 'length_penalty is nan; expected a finite number, at least 0'),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(how, message):
    with pytest.raises(UserError) as error:
        beam_search(markov, jnp.zeros((2, 4, 4)), jnp.zeros(2, int), **{'beams': 2, 'max_tokens': 3, 'eos_id': E, **how})
    assert str(error.value) == message


def test_shapes_are_refused():
    search = lambda state, first: beam_search(markov, state, first, beams=2, max_tokens=3, eos_id=E)
    with pytest.raises(ValueError, match=r"^state\['at'\] has shape \(\); expected the batch axis first, of 2 rows$"):
        search({'at': jnp.int32(0), 'keys': jnp.zeros((2, 4))}, jnp.zeros(2, int))
    with pytest.raises(ValueError, match=r'^first_tokens has shape \(\); expected \[B\], one token a row$'):
        search(jnp.zeros((2, 4, 4)), jnp.int32(0))


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_a_row_that_meets_logits_that_are_not_numbers_has_no_hypotheses(value):
    """Row 1 at once, row 2 after token 1, of which one of its beams consists; row 0 as without them."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 4)), jnp.float32)
    how = {'beams': 3, 'max_tokens': 4, 'eos_id': 3, 'length_penalty': 1.0}
    whole = decode(markov, logits, **how)
    assert np.all(np.isfinite(whole.scores))
    found = decode(markov, logits.at[1, 0, 2].set(value).at[2, 1, 0].set(value), **how)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y[0]), found, whole)
    assert found.tokens[1:, :, 0].tolist() == [[-1] * 3] * 2 and np.all(found.tokens[1:, :, 1:] == 0)
    assert np.all(np.isnan(found.scores[1:])) and np.all(found.lengths[1:] == 0)
    with pytest.raises(RunError, match='row 1: the logits of token 0 are NaN or infinite'):
        check_decoded_tokens(found.tokens)


def test_what_no_hypothesis_reaches_may_be_nan():
    """Token 1 has no probability; what follows it does not matter."""
    logits = jnp.zeros((1, 3, 3)).at[:, :, 1].set(-jnp.inf)
    how = {'beams': 4, 'max_tokens': 3, 'eos_id': 2}
    found, whole = (decode(markov, x, **how) for x in (logits.at[:, 1].set(jnp.nan), logits))
    jax.tree.map(np.testing.assert_array_equal, found, whole)
    assert whole.lengths.tolist() == [[1, 2, 3, 3]]


def test_integers_of_numpy_are_served_as_those_of_python():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 4)), jnp.float32)
    how = {'beams': 2, 'max_tokens': 3, 'eos_id': 3}
    found = decode(markov, logits, **{name: np.int64(number) for name, number in how.items()})
    jax.tree.map(np.testing.assert_array_equal, found, decode(markov, logits, **how))
