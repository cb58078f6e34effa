"""Greedy decoding of tables of probabilities in place of a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.decode.greedy import greedy_search
from attnlab.decode.sampling import check_decoded_tokens
from attnlab.errors import RunError

V, S, BOS, EOS = 6, 4, 2, 3


def tables(batch, seed=0, eos=0.0):
    """[B, V, V] logits of the next token given the previous one, and [B, V, S] weights given the previous one."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(batch, V, V)).astype(np.float32)
    logits[:, :, EOS] += eos
    weights = random.dirichlet(np.ones(S), (batch, V)).astype(np.float32)
    return jnp.asarray(logits), jnp.asarray(weights)


def step(state, previous):
    logits, weights = state
    row = jnp.arange(previous.shape[0])
    return state, logits[row, previous], weights[row, previous]


def decode(state, limit=8):
    return jax.jit(lambda state: greedy_search(step, state, len(state[0]), bos_id=BOS, eos_id=EOS, max_tokens=limit))(state)


def walk(logits, weights, limit):
    """The same of one row, by a loop: what is said, and the weights it was said with."""
    said, seen, previous = [], [], BOS
    while len(said) < limit and (not said or said[-1] != EOS):
        said.append(int(np.argmax(logits[previous])))
        seen.append(weights[previous])
        previous = said[-1]
    return said, seen


def test_takes_the_most_probable_token_of_each_step_and_zeros_after_eos():
    state = tables(40, eos=0.5)
    tokens, weights = decode(state)
    lengths = set()
    for b in range(40):
        said, seen = walk(np.asarray(state[0][b]), np.asarray(state[1][b]), 8)
        lengths.add(len(said))
        np.testing.assert_array_equal(tokens[b], said + [0] * (8 - len(said)))
        np.testing.assert_array_equal(weights[b, : len(said)], seen)
        assert jnp.all(weights[b, len(said) :] == 0)
    assert {1, 2, 3, 8} <= lengths  # some at once, some later, some never


def test_ties_go_to_the_lowest_token():
    flat = jnp.zeros((1, V, V)).at[:, :, :2].set(-1.0)
    assert decode((flat, jnp.ones((1, V, S))))[0].tolist() == [[2] * 8]


def test_a_stub_that_says_only_eos_says_it_once():
    tokens, weights = decode(tables(3, eos=99.0))
    assert tokens.tolist() == [[EOS] + [0] * 7] * 3
    np.testing.assert_array_equal(weights[:, 0], tables(3, eos=99.0)[1][:, BOS])
    assert jnp.all(weights[:, 1:] == 0)


@pytest.mark.parametrize('limit', [1, 5])
def test_a_stub_that_never_ends_stops_at_the_limit(limit):
    tokens, weights = decode(tables(2, eos=-99.0), limit)
    assert tokens.shape == (2, limit) and weights.shape == (2, limit, S)
    assert not jnp.any(tokens == EOS)
    said = [walk(*(np.asarray(x[b]) for x in tables(2, eos=-99.0)), limit)[0] for b in range(2)]
    assert tokens.tolist() == said


def test_the_first_token_follows_bos():
    echo = jnp.broadcast_to(10 * jnp.eye(V)[None], (1, V, V))  # says what was said
    assert decode((echo, jnp.ones((1, V, S))), 3)[0].tolist() == [[BOS] * 3]


def test_rows_do_not_see_their_neighbours():
    state = tables(12, eos=0.5)
    together = decode(state)
    for b in range(12):
        alone = decode(jax.tree.map(lambda x: x[b : b + 1], state))  # noqa: B023
        jax.tree.map(lambda a, x: np.testing.assert_array_equal(a[0], x[b]), alone, together)  # noqa: B023


def test_the_loop_ends_with_the_last_row():
    taken = []

    def noted(state, previous):
        jax.debug.callback(lambda _: taken.append(1), previous)
        return step(state, previous)

    jax.block_until_ready(greedy_search(noted, tables(3, eos=99.0), 3, bos_id=BOS, eos_id=EOS, max_tokens=50))
    jax.effects_barrier()
    assert len(taken) == 1


def test_state_is_carried_from_step_to_step():
    """Token t is 4 + t % 2, by a count in the state alone."""

    def counted(count, previous):
        logits = jax.nn.one_hot(4 + count % 2, V)
        return count + 1, logits, jax.nn.one_hot(count, S)

    tokens, weights = greedy_search(counted, jnp.zeros(2, int), 2, bos_id=BOS, eos_id=EOS, max_tokens=4)
    assert tokens.tolist() == [[4, 5, 4, 5]] * 2
    np.testing.assert_array_equal(weights, np.broadcast_to(np.eye(4), (2, 4, 4)))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_dtypes_and_a_model_without_weights(dtype):
    logits, weights = (x.astype(dtype) for x in tables(2))
    decoded = decode((logits, weights[..., :0]))
    assert decoded.tokens.dtype == jnp.int32
    assert decoded.weights.dtype == dtype and decoded.weights.shape == (2, 8, 0)


def test_compiles_once():
    traced = []

    def noted(state, previous):
        traced.append(previous.shape)
        return step(state, previous)

    decode = jax.jit(lambda state: greedy_search(noted, state, 3, bos_id=BOS, eos_id=EOS, max_tokens=8).tokens)
    first = decode(tables(3))
    count = len(traced)
    second = decode(tables(3, seed=1, eos=1.0))
    assert len(traced) == count and jnp.any(first != second)
    assert decode._cache_size() == 1


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_logits_that_are_not_numbers_end_a_row_with_no_token(value):
    """Row 1 meets one such logit after its first token, row 2 at once; row 0 goes on as without them."""
    logits, weights = tables(3, eos=-99.0)
    whole = decode((logits, weights))
    after_first = int(whole.tokens[1, 0])
    assert after_first != BOS
    broken = logits.at[1, after_first, 4].set(value).at[2, BOS, 0].set(value)
    found = decode((broken, jnp.where(jnp.isfinite(broken[..., :S]), weights, jnp.nan)))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y[0]), found, whole)
    assert found.tokens[1:].tolist() == [[after_first, -1, 0, 0, 0, 0, 0, 0], [-1, 0, 0, 0, 0, 0, 0, 0]]
    assert jnp.all(found.weights[1, 1:] == 0) and jnp.all(found.weights[2] == 0)
    with pytest.raises(RunError, match='row 1: the logits of token 1 are NaN or infinite'):
        check_decoded_tokens(found.tokens)
