"""Batches of few shapes with each example once, as a function of seed and step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlab.data import batches

WIDTHS = (4, 8, 16)


@pytest.mark.parametrize(
    'length, width',
    [(0, 4), (1, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16), (17, 32), (32, 32), (33, 48), (160, 160)],
)
def test_padded_width_is_the_smallest_that_fits_or_a_multiple_of_the_last(length, width):
    assert batches.padded_width(length, WIDTHS) == width
    assert batches.padded_width(length, [16]) == -(-max(length, 1) // 16) * 16


@given(
    lengths=st.lists(st.integers(0, 40), max_size=60),
    widths=st.lists(st.integers(1, 20), min_size=1, max_size=4, unique=True).map(sorted),
    batch_size=st.integers(1, 9),
    random=st.randoms(use_true_random=False),
)
def test_each_example_is_planned_once_in_full_batches(lengths, widths, batch_size, random):
    order = list(range(len(lengths)))
    random.shuffle(order)
    planned = batches.plan_batches(np.array(lengths, int), np.array(order, int), widths, batch_size)
    rows = [row for _, examples in planned for row in examples.tolist()]
    assert sorted(row for row in rows if row >= 0) == sorted(order)
    assert len(planned) == -(-len(lengths) // batch_size)
    assert all(len(examples) == batch_size for _, examples in planned)
    assert rows.count(-1) < batch_size  # only the last batch has empty rows, at its end
    assert -1 not in rows[: len(lengths)]
    own = {batches.padded_width(length, widths) for length in lengths}
    assert {width for width, _ in planned} <= own
    for width, examples in planned:
        assert all(lengths[row] <= width for row in examples if row >= 0)
    # Only the rest of each width that fills no batch goes to the next width: less than one batch for each width.
    moved = [row for width, examples in planned for row in examples
             if row >= 0 and batches.padded_width(lengths[row], widths) < width]  # fmt: skip
    assert len(moved) < batch_size * max(1, len(own))


def test_the_remainder_of_a_width_goes_to_the_next_width():
    lengths = np.array([3, 3, 3, 7, 7, 12])
    planned = batches.plan_batches(lengths, np.arange(6), WIDTHS, 2)
    assert [(width, rows.tolist()) for width, rows in planned] == [(4, [0, 1]), (8, [2, 3]), (16, [4, 5])]
    planned = batches.plan_batches(lengths, np.arange(6), WIDTHS, 4)
    assert [(width, rows.tolist()) for width, rows in planned] == [(8, [0, 1, 2, 3]), (16, [4, 5, -1, -1])]


def test_examples_are_planned_in_their_order():
    planned = batches.plan_batches(np.full(4, 3), np.array([2, 0, 3, 1]), WIDTHS, 2)
    assert [rows.tolist() for _, rows in planned] == [[2, 0], [3, 1]]


def lengths(count=103):
    return np.random.default_rng(0).integers(1, 17, count)


def epoch(batch_at, number, count=103, batch_size=8):
    """Return the batches of an epoch as (width, rows)."""
    steps = -(-count // batch_size)
    return [(width, rows.tolist()) for width, rows in map(batch_at, range(number * steps, (number + 1) * steps))]


def test_each_epoch_visits_each_example_once():
    batch_at = batches.shuffled_batches(lengths(), WIDTHS, 8, seed=0)
    for number in range(4):
        rows = [row for _, rows in epoch(batch_at, number) for row in rows]
        assert sorted(rows) == [-1] * (13 * 8 - 103) + list(range(103))


def test_the_batch_of_a_step_is_a_function_of_seed_and_step_alone():
    batch_at = batches.shuffled_batches(lengths(), WIDTHS, 8, seed=0)
    straight = [batch_at(step) for step in range(60)]
    fresh = batches.shuffled_batches(lengths(), WIDTHS, 8, seed=0)
    for step in np.random.default_rng(1).permutation(60):  # out of order, over more epochs than are cached
        width, rows = fresh(int(step))
        assert width == straight[step].width
        np.testing.assert_array_equal(rows, straight[step].examples)


def test_epochs_and_seeds_differ_in_members_and_in_order():
    first, other = (batches.shuffled_batches(lengths(), WIDTHS, 8, seed) for seed in (0, 1))
    orders = [epoch(first, 0), epoch(first, 1), epoch(first, 2), epoch(other, 0), epoch(other, 1)]
    sets = [frozenset(frozenset(rows) for _, rows in order) for order in orders]
    sequences = [tuple(width for width, _ in order) for order in orders]
    assert len(set(sets)) == len(sets) and len(set(sequences)) == len(sequences)
    assert all(list(widths) != sorted(widths) for widths in sequences)  # widths are not in ascending order


def test_there_are_as_few_shapes_as_widths():
    batch_at = batches.shuffled_batches(lengths(), WIDTHS, 8, seed=0)
    shapes = {(width, rows.shape) for width, rows in map(batch_at, range(200))}
    assert {width for width, _ in shapes} <= set(WIDTHS) and {shape for _, shape in shapes} == {(8,)}


def test_padding_is_zero_after_sequences_and_in_empty_rows():
    padded = batches.pad_sequences([[5, 6, 7], [], [8]], np.array([2, -1, 0, 1]), 4)
    assert padded.dtype == np.int32
    assert padded.tolist() == [[8, 0, 0, 0], [0, 0, 0, 0], [5, 6, 7, 0], [0, 0, 0, 0]]


def test_a_sequence_that_is_too_long_is_refused():
    with pytest.raises(ValueError):
        batches.pad_sequences([[1, 2, 3, 4, 5]], np.array([0]), 4)


@pytest.mark.parametrize('bad', [100, -1, 1000])
def test_an_id_outside_the_vocabulary_is_named(bad):
    with pytest.raises(ValueError, match=f'token id {bad} is outside the vocabulary; expected 0 <= id < 100'):
        batches.check_token_ids([[], [1, 2], [0, 99, bad, 5]], 100)


def test_ids_inside_the_vocabulary_are_accepted():
    batches.check_token_ids([[], [0], [99, 1]], 100)
    batches.check_token_ids([], 1)
