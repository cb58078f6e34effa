"""Position encodings, the table of learned positions, and the relative position bias."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.configs import LanguageModelConfig, VitConfig
from attnlab.kernels.positions import relative_position_buckets
from attnlab.layers.positions import (
    ENCODINGS,
    AddPositionEmbeddings,
    PositionEncoding,
    PositionTable,
    RelativePositionBias,
    make_position_encoding,
)

SIZE, D = 8, 3
MODULE = PositionTable(SIZE, D)
TABLE = jnp.arange(1.0, SIZE * D + 1).reshape(SIZE, D)
VARIABLES = {'params': {'table': TABLE}}


def test_a_length_gives_the_first_rows_and_positions_give_their_rows():
    np.testing.assert_array_equal(MODULE.apply(VARIABLES, 5), TABLE[:5])
    np.testing.assert_array_equal(MODULE.apply(VARIABLES, SIZE), TABLE)
    assert MODULE.apply(VARIABLES, 0).shape == (0, D)
    positions = np.array([[7, 0, 0], [1, 2, 3]])
    for array in (positions, jnp.asarray(positions)):
        np.testing.assert_array_equal(MODULE.apply(VARIABLES, array), np.asarray(TABLE)[positions])
    np.testing.assert_array_equal(jax.jit(MODULE.apply)(VARIABLES, positions), np.asarray(TABLE)[positions])


def test_the_initial_table_does_not_depend_on_the_length():
    params = MODULE.init(jax.random.key(0), 2)['params']
    assert jax.tree.map(jnp.shape, params) == {'table': (SIZE, D)}
    table = PositionTable(200, 50).init(jax.random.key(0), 1)['params']['table']
    assert abs(float(table.std()) - 0.02) < 1e-3


def test_only_rows_that_are_read_get_a_gradient():
    gradient = jax.grad(lambda v: MODULE.apply(v, jnp.array([[1, 4], [4, 4]])).sum())(VARIABLES)['params']['table']
    np.testing.assert_array_equal(gradient, np.array([0, 1, 0, 0, 3, 0, 0, 0])[:, None] * np.ones((1, D)))


def test_tokens_of_a_grid_are_row_major():
    """In a grid of 3 rows of 4 tokens, the token in row r, column c has row 4 r + c of the table."""
    table = jnp.arange(12.0 * D).reshape(12, D)
    embeddings = PositionTable(12, D).apply({'params': {'table': table}}, 12).reshape(3, 4, D)
    for r, c in np.ndindex(3, 4):
        np.testing.assert_array_equal(embeddings[r, c], table[4 * r + c])


@pytest.mark.parametrize('jit', [True, False])
def test_a_length_beyond_the_table_raises(jit):
    def run(variables, x):
        return x + MODULE.apply(variables, x.shape[-2])

    with pytest.raises(ValueError, match='length is 9; expected at most 8, the rows of the position table'):
        (jax.jit(run) if jit else run)(VARIABLES, jnp.zeros((9, D)))


@pytest.mark.parametrize('jit', [True, False])
@pytest.mark.parametrize(('positions', 'value'), [([0, 8], 8), ([[-1, 3]], -1), ([2, 100, -5], 100), ([2**40], 2**40)])
def test_a_known_position_outside_the_table_raises(positions, value, jit):
    run = lambda variables: MODULE.apply(variables, np.array(positions))
    with pytest.raises(ValueError, match=f'position {value} is outside the position table; expected 0 .. 7'):
        (jax.jit(run) if jit else run)(VARIABLES)


def test_a_traced_position_outside_the_table_gives_nan():
    rows = jax.jit(MODULE.apply)(VARIABLES, jnp.array([-1, 7, 8, 2**31 - 1, -(2**31)]))
    assert np.isnan(rows).all(-1).tolist() == [True, False, True, True, True]


@pytest.mark.parametrize(('positions', 'message'), [
    (-1, 'length is -1; expected at most 8'),
    (np.array([1.0]), 'positions have dtype float32; expected integers'),
])  # fmt: skip
def test_wrong_positions_raise(as_used, positions, message):
    with pytest.raises(ValueError, match=message):
        MODULE.apply(VARIABLES, positions)


# The relative position bias


@pytest.mark.parametrize('bidirectional', [True, False])
def test_the_bias_of_a_pair_is_the_table_entry_of_its_bucket(bidirectional):
    module = RelativePositionBias(heads=2, buckets=8, max_distance=20, bidirectional=bidirectional)
    queries, keys = jnp.array([[0, 5, 9], [30, 2, 2]]), jnp.arange(-4, 4)[None] * jnp.array([[1], [3]])
    variables = jax.jit(module.init)(jax.random.key(0), queries[0], keys[0])
    table = np.asarray(variables['params']['table'])
    bias = jax.jit(module.apply)(variables, queries, keys)
    assert table.shape == (8, 2) and bias.shape == (2, 2, 3, 8)
    buckets = relative_position_buckets(queries, keys, buckets=8, max_distance=20, bidirectional=bidirectional)
    for b, n, t, s in np.ndindex(*bias.shape):
        assert bias[b, n, t, s] == table[buckets[b, t, s], n]
    np.testing.assert_array_equal(jax.jit(module.apply)(variables, queries[1], keys[1]), bias[1:])


def test_the_gradient_of_the_table_is_the_number_of_pairs_in_each_bucket():
    module, positions = RelativePositionBias(heads=1, buckets=4, max_distance=3), jnp.arange(3)
    variables = {'params': {'table': jnp.zeros((4, 1))}}
    gradient = jax.jit(jax.grad(lambda v: module.apply(v, positions, positions).sum()))(variables)['params']['table']
    # 3 pairs on the diagonal, 3 with an earlier key, none in bucket 2, 3 with a later key.
    np.testing.assert_array_equal(gradient[:, 0], [3, 3, 0, 3])


def test_init_raises_if_max_distance_is_too_small_for_the_buckets():
    with pytest.raises(ValueError, match='max_distance is 8; expected more than 8'):
        RelativePositionBias(4, max_distance=8).init(jax.random.key(0), jnp.arange(2), jnp.arange(2))


# Encodings


@dataclasses.dataclass(frozen=True)
class EvenPositions(PositionEncoding):
    """Adds one to the embeddings of even positions."""

    def position_embeddings(self, x, positions=None, prefix=0):
        return jnp.broadcast_to((1.0 - jnp.arange(x.shape[1]) % 2)[None, :, None], (1, *x.shape[1:]))


def test_a_class_in_the_table_is_a_new_encoding(monkeypatch):
    monkeypatch.setitem(ENCODINGS, 'even', EvenPositions)
    config = LanguageModelConfig(layers=1, width=4, heads=1, context=SIZE, positions='even')
    encoding = make_position_encoding(config)
    added = AddPositionEmbeddings(encoding).apply({}, jnp.zeros((1, 3, 4)))
    np.testing.assert_array_equal(added[0, :, 0], [1, 0, 1])
    with pytest.raises(ValueError, match="positions is 'even'; expected 'learned', 'sinusoidal', 'rotary', 'none'"):
        make_position_encoding(VitConfig(positions='even'), (2, 2))


@pytest.mark.parametrize('name', ENCODINGS)
def test_encodings_have_the_hyperparameters_of_the_config(name):
    encoding = make_position_encoding(LanguageModelConfig(context=SIZE, positions=name, rotary_base=50.0))
    assert isinstance(encoding, ENCODINGS[name]) and encoding.grid is None
    assert encoding.max_length == (SIZE if name == 'learned' else None)
    assert getattr(encoding, 'base', 50.0) == 50.0
