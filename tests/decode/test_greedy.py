"""Greedy decoding, with tables of logits in place of a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.decode.greedy import greedy_search
from attnlab.decode.sampling import check_decoded_tokens
from attnlab.errors import RunError

V, S, BOS, EOS = 6, 4, 2, 3


def random_tables(batch, seed=0, eos_bonus=0.0):
    """Return random logits [B, V, V] of the next token and attention weights [B, V, S], both by the previous token."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(batch, V, V)).astype(np.float32)
    logits[:, :, EOS] += eos_bonus
    weights = random.dirichlet(np.ones(S), (batch, V)).astype(np.float32)
    return jnp.asarray(logits), jnp.asarray(weights)


def step(state, previous):
    logits, weights = state
    row = jnp.arange(previous.shape[0])
    return state, logits[row, previous], weights[row, previous]


def decode(state, max_tokens=8):
    """Run `greedy_search` on tables."""
    search = lambda state: greedy_search(step, state, len(state[0]), bos_id=BOS, eos_id=EOS, max_tokens=max_tokens)
    return jax.jit(search)(state)


def decode_one_row(logits, weights, max_tokens):
    """Decode one row in a Python loop; return its tokens and the weights of each."""
    tokens, token_weights, previous = [], [], BOS
    while len(tokens) < max_tokens and (not tokens or tokens[-1] != EOS):
        tokens.append(int(np.argmax(logits[previous])))
        token_weights.append(weights[previous])
        previous = tokens[-1]
    return tokens, token_weights


@pytest.mark.slow
def test_each_token_is_the_most_probable_and_zeros_follow_eos():
    state = random_tables(40, eos_bonus=0.5)
    tokens, weights = decode(state)
    lengths = set()
    for b in range(40):
        expected, expected_weights = decode_one_row(np.asarray(state[0][b]), np.asarray(state[1][b]), 8)
        n = len(expected)
        lengths.add(n)
        np.testing.assert_array_equal(tokens[b], expected + [0] * (8 - n))
        np.testing.assert_array_equal(weights[b, :n], expected_weights)
        assert jnp.all(weights[b, n:] == 0)
    assert {1, 2, 3, 8} <= lengths  # rows that end at once, later and never


def test_ties_go_to_the_lowest_token():
    tied = jnp.zeros((1, V, V)).at[:, :, :2].set(-1.0)
    assert decode((tied, jnp.ones((1, V, S))))[0].tolist() == [[2] * 8]


def test_a_row_that_starts_with_eos_has_one_token():
    tokens, weights = decode(random_tables(3, eos_bonus=99.0))
    assert tokens.tolist() == [[EOS] + [0] * 7] * 3
    np.testing.assert_array_equal(weights[:, 0], random_tables(3, eos_bonus=99.0)[1][:, BOS])
    assert jnp.all(weights[:, 1:] == 0)


@pytest.mark.parametrize('max_tokens', [1, 5])
def test_a_row_without_eos_has_max_tokens_tokens(max_tokens):
    tokens, weights = decode(random_tables(2, eos_bonus=-99.0), max_tokens)
    assert tokens.shape == (2, max_tokens) and weights.shape == (2, max_tokens, S)
    assert not jnp.any(tokens == EOS)
    logits, weights = map(np.asarray, random_tables(2, eos_bonus=-99.0))
    assert tokens.tolist() == [decode_one_row(logits[b], weights[b], max_tokens)[0] for b in range(2)]


def test_the_first_token_follows_bos():
    repeat = jnp.broadcast_to(10 * jnp.eye(V)[None], (1, V, V))  # the next token is the previous one
    assert decode((repeat, jnp.ones((1, V, S))), 3)[0].tolist() == [[BOS] * 3]


def test_a_row_does_not_depend_on_the_rest_of_the_batch():
    state = random_tables(12, eos_bonus=0.5)
    together = decode(state)
    for b in range(12):
        alone = decode(jax.tree.map(lambda x: x[b : b + 1], state))  # noqa: B023
        jax.tree.map(lambda a, x: np.testing.assert_array_equal(a[0], x[b]), alone, together)  # noqa: B023


def test_the_loop_stops_when_all_rows_have_ended():
    steps = []

    def counting_step(state, previous):
        jax.debug.callback(lambda _: steps.append(1), previous)
        return step(state, previous)

    state = random_tables(3, eos_bonus=99.0)
    jax.block_until_ready(greedy_search(counting_step, state, 3, bos_id=BOS, eos_id=EOS, max_tokens=50))
    jax.effects_barrier()
    assert len(steps) == 1


def test_state_is_carried_from_step_to_step():
    """Token t is 4 + t % 2, which depends only on a count in the state."""

    def counting_step(count, previous):
        logits = jax.nn.one_hot(4 + count % 2, V)
        return count + 1, logits, jax.nn.one_hot(count, S)

    tokens, weights = greedy_search(counting_step, jnp.zeros(2, int), 2, bos_id=BOS, eos_id=EOS, max_tokens=4)
    assert tokens.tolist() == [[4, 5, 4, 5]] * 2
    np.testing.assert_array_equal(weights, np.broadcast_to(np.eye(4), (2, 4, 4)))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_dtypes_are_kept_and_weights_may_have_no_keys(dtype):
    logits, weights = (x.astype(dtype) for x in random_tables(2))
    result = decode((logits, weights[..., :0]))
    assert result.tokens.dtype == jnp.int32
    assert result.weights.dtype == dtype and result.weights.shape == (2, 8, 0)


def test_one_program_serves_all_tables():
    traces = []

    def traced_step(state, previous):
        traces.append(previous.shape)
        return step(state, previous)

    decode = jax.jit(lambda state: greedy_search(traced_step, state, 3, bos_id=BOS, eos_id=EOS, max_tokens=8).tokens)
    first = decode(random_tables(3))
    count = len(traces)
    second = decode(random_tables(3, seed=1, eos_bonus=1.0))
    assert len(traces) == count and jnp.any(first != second)
    assert decode._cache_size() == 1


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_invalid_logits_end_a_row_with_the_invalid_token(value):
    """Row 1 has an invalid logit after its first token, row 2 at once; row 0 is as without them."""
    logits, weights = random_tables(3, eos_bonus=-99.0)
    valid = decode((logits, weights))
    first_token = int(valid.tokens[1, 0])
    assert first_token != BOS
    logits = logits.at[1, first_token, 4].set(value).at[2, BOS, 0].set(value)
    result = decode((logits, jnp.where(jnp.isfinite(logits[..., :S]), weights, jnp.nan)))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y[0]), result, valid)
    assert result.tokens[1:].tolist() == [[first_token, -1, 0, 0, 0, 0, 0, 0], [-1, 0, 0, 0, 0, 0, 0, 0]]
    assert jnp.all(result.weights[1, 1:] == 0) and jnp.all(result.weights[2] == 0)
    with pytest.raises(RunError, match='row 1: the logits of token 1 are NaN or infinite'):
        check_decoded_tokens(result.tokens)
