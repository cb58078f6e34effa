"""Random and consecutive windows and packed documents, compared with plain loops."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlab.data.corpus import SourceText
from attnlab.data.rows import (
    IGNORE_LABEL,
    TokenRows,
    consecutive_windows,
    ordered_row_batches,
    pack_documents,
    random_windows,
    shuffled_row_batches,
)
from attnlab.data.tokenizers import CharacterTokenizer, encode_document
from attnlab.errors import UserError


def test_random_windows_depend_on_seed_and_step():
    ids = np.arange(100, 150, dtype=np.uint16)
    draw = random_windows(ids, T=7, B=5, seed=3)
    batches = [draw(step) for step in range(200)]
    again = random_windows(ids, 7, 5, 3)
    for step in (199, 0, 3):
        for one, other in zip(again(step), batches[step], strict=True):
            np.testing.assert_array_equal(one, other)
    for batch in batches:
        assert all(values.shape == (5, 7) and values.dtype == np.int32 for values in batch)
        for row, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
            assert row == list(range(row[0], row[0] + 7)) and labels == [i + 1 for i in row]
        assert (batch.segment_ids == 1).all() and (batch.positions == np.arange(7)).all()
    starts = Counter(int(start) for batch in batches for start in batch.tokens[:, 0])
    assert set(starts) == set(range(100, 143))  # the last label of the last window is the last token
    assert max(starts.values()) < 2.2 * 1000 / 43 and min(starts.values()) > 0.4 * 1000 / 43
    orders = {tuple(random_windows(ids, 7, 5, seed)(step).tokens[:, 0]) for seed in range(9) for step in range(9)}
    assert len(orders) == 81
    # If seed and step were one list of 32-bit words, both would be 0, 1, 5.
    assert (random_windows(ids, 7, 5, 2**32)(5).tokens != random_windows(ids, 7, 5, 0)(5 * 2**32 + 1).tokens).any()


def test_a_text_that_is_too_short_is_refused():
    assert (random_windows(np.arange(8), 7, 2, 0)(0).labels == np.arange(1, 8)).all()
    with pytest.raises(UserError, match='the text has 7 tokens; windows of 7 need at least 8'):
        random_windows(np.arange(7), 7, 2, 0)
    for count in (0, 1):
        with pytest.raises(UserError, match=f'the text has {count} tokens; expected at least 2'):
            consecutive_windows(np.arange(count), 7)
    rows = consecutive_windows(np.array([5, 6]), 3)
    assert [values.tolist() for values in rows] == [[[5, 0, 0]], [[6, -1, -1]], [[1, 0, 0]], [[0, 0, 1]]]


@pytest.mark.parametrize('call', [
    lambda: random_windows(np.arange(9), 0, 2, 0),
    lambda: random_windows(np.arange(9), 2, 0, 0),
    lambda: consecutive_windows(np.arange(9), 0),
    lambda: pack_documents([np.arange(9)], 0),
    lambda: ordered_row_batches(consecutive_windows(np.arange(9), 2), 0),
    lambda: shuffled_row_batches(consecutive_windows(np.arange(9), 2), 0, 0),
])  # fmt: skip
def test_sizes_below_one_are_refused(call):
    with pytest.raises(UserError, match='rows of . tokens, . in a batch; expected at least 1 of each'):
        call()


def expected_positions(segments: list[int]) -> list[int]:
    """Return positions that start from 0 at each new segment."""
    out = []
    for at, segment in enumerate(segments):
        out.append(out[-1] + 1 if at and segments[at - 1] == segment else 0)
    return out


def check_rows(rows: TokenRows) -> None:
    """Check shapes, dtypes, labels and positions of rows."""
    for values in rows:
        assert values.dtype == np.int32 and values.shape == rows.tokens.shape
    for tokens, labels, segments, positions in zip(*(values.tolist() for values in rows), strict=True):
        assert positions == expected_positions(segments)
        for at, segment in enumerate(segments):
            if segment == 0:
                assert (tokens[at], labels[at]) == (0, IGNORE_LABEL)
            elif at + 1 < len(segments) and segments[at + 1] == segment:
                assert labels[at] == tokens[at + 1]


@given(st.integers(2, 60), st.integers(1, 12), st.integers(1, 5))
def test_every_token_is_predicted_once(count, T, B):
    ids = np.random.default_rng(count).integers(0, 9, count)
    rows = consecutive_windows(ids, T)
    check_rows(rows)
    pairs = []
    assert len(rows.tokens) == len(range(0, count - 1, T))  # no row has only padding
    for start in range(0, count - 1, T):
        pairs += [(int(ids[at]), int(ids[at + 1])) for at in range(start, min(start + T, count - 1))]
    found = []
    for batch in ordered_row_batches(rows, B):
        check_rows(batch)
        assert batch.tokens.shape == (B, T)
        for row, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
            found += [(one, label) for one, label in zip(row, labels, strict=True) if label != IGNORE_LABEL]
    assert found == pairs and [label for _, label in found] == ids[1:].tolist()


# Packing


def pack_with_loops(lists, T):
    """Pack by best fit, searching all rows."""
    rows = []
    for document in lists:
        for start in range(0, len(document), T):
            piece = document[start : start + T]
            after = document[start + T] if start + T < len(document) else IGNORE_LABEL
            free = [(T - len(row), at) for at, row in enumerate(rows) if T - len(row) >= len(piece)]
            if free:
                row = rows[min(free)[1]]
            else:
                row = []
                rows.append(row)
            number = row[-1][2] + 1 if row else 1
            labels = [*piece[1:], after]
            row += [(token, label, number, at) for at, (token, label) in enumerate(zip(piece, labels, strict=True))]
    return [row + [(0, IGNORE_LABEL, 0, at) for at in range(T - len(row))] for row in rows]


LISTS = st.lists(st.lists(st.integers(1, 99), max_size=14), min_size=1, max_size=20)


@given(LISTS.filter(any), st.integers(1, 9))
@settings(max_examples=200)
def test_packing_matches_plain_loops(lists, T):
    rows = pack_documents([np.array(document, np.int64) for document in lists], T)
    check_rows(rows)
    expected = np.array(pack_with_loops(lists, T), np.int32)
    for values, right in zip(rows, np.moveaxis(expected, 2, 0), strict=True):
        np.testing.assert_array_equal(values, right)
    scored = Counter(rows.labels[rows.labels != IGNORE_LABEL].tolist())
    assert scored == Counter(i for document in lists for i in document[1:])
    assert Counter(rows.tokens[rows.segment_ids > 0].tolist()) == Counter(i for document in lists for i in document)


def test_no_label_is_a_token_of_another_document():
    """The labels of <s> a b are a b </s>, and no label is a token of another document (cases 36 and 51)."""
    tokenizer = CharacterTokenizer('ab', marked=True)
    end, _ = tokenizer.marks
    documents = [encode_document(tokenizer, SourceText(text, 'x')) for text in ('ab', 'b', 'aab')]
    packed = pack_documents(documents, 8)
    assert packed.tokens.tolist() == [[end, 0, 1, end, end, 1, end, 0], [end, 0, 0, 1, end, 0, 0, 0]]
    assert packed.labels.tolist() == [[0, 1, end, -1, 1, end, -1, -1], [0, 0, 1, end, -1, -1, -1, -1]]
    assert packed.segment_ids.tolist() == [[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 0, 0, 0]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 2, 3, 4, 0, 1, 2]]


def test_packing_no_tokens_is_refused():
    for empty in ([], [np.array([], np.int32)]):
        with pytest.raises(UserError, match='no documents to pack'):
            pack_documents(empty, 4)


def test_packing_leaves_little_padding():
    random = np.random.default_rng(0)
    lengths = random.integers(4, 40, 20_000)
    rows = pack_documents([np.ones(length, np.int32) for length in lengths], 64)
    assert len(rows.tokens) < 1.02 * lengths.sum() / 64


def test_each_packed_row_comes_once_an_epoch():
    rows = pack_documents([np.full(length, length, np.int32) for length in range(1, 12)], 16)
    count = len(rows.tokens)
    batch_at = shuffled_row_batches(rows, 3, seed=1)
    steps = -(-count // 3)
    orders = []
    for number in range(3):
        batches = [batch_at(step) for step in range(number * steps, (number + 1) * steps)]
        for batch in batches:
            check_rows(batch)
            assert batch.tokens.shape == (3, 16)
        rows_ = np.concatenate([np.stack(batch, 1) for batch in batches])
        full = rows_[(rows_[:, 2] > 0).any(1)]
        assert sorted(map(bytes, full)) == sorted(map(bytes, np.stack(rows, 1)))
        orders.append(full.tobytes())
    assert len(set(orders)) == 3
    np.testing.assert_array_equal(shuffled_row_batches(rows, 3, seed=1)(2).tokens, batch_at(2).tokens)
    np.testing.assert_array_equal(
        np.concatenate([batch.tokens for batch in ordered_row_batches(rows, 3)])[:count], rows.tokens
    )
