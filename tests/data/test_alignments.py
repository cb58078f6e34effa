"""Reading and writing of alignment links, and the alignment error rate."""

import itertools
import os
import random
import threading

import pytest

from attnlab.data.alignments import (
    AlignmentScores,
    GoldLinks,
    alignment_error_rate,
    read_gold_links,
    read_links,
    score_alignment_files,
    write_links,
)
from attnlab.data.text import read_lines
from attnlab.errors import UserError


def links(sure, possible=()):
    return GoldLinks(frozenset(sure), frozenset(sure) | frozenset(possible))


def write(path, text):
    path.write_text(text, encoding='utf-8')
    return path


# Formats


def test_naacl_links_are_read(tmp_path):
    text = '\n1 1 1 S\n1 1 2 P\n\n3 2 1\n0003 0002 0002 P 0.5\n3 3 3 0.25\n5 1 1 P\n5 1 1 S\n5 1 1 P\n'
    path = write(tmp_path / 'a.naacl', text)
    assert read_gold_links(path) == {
        1: links({(0, 0)}, {(0, 1)}), 3: links({(1, 0), (2, 2)}, {(1, 1)}), 5: links({(0, 0)}),
    }  # fmt: skip
    assert read_links(path) == {1: {(0, 0), (0, 1)}, 3: {(1, 0), (1, 1), (2, 2)}, 5: {(0, 0)}}


def test_pharaoh_links_are_read(tmp_path):
    path = write(tmp_path / 'a.talp', '\n0-0 1p2 10-3\n\n2p1 2-1\n\n')
    empty = links(())
    assert read_gold_links(path) == {
        1: empty, 2: links({(0, 0), (10, 3)}, {(1, 2)}), 3: empty, 4: links({(2, 1)}), 5: empty,
    }  # fmt: skip
    assert read_links(path, swap=True) == {1: set(), 2: {(0, 0), (2, 1), (3, 10)}, 3: set(), 4: {(1, 2)}, 5: set()}


@pytest.mark.parametrize(('text', 'message'), [
    ('1 1 1 S\n1 1\n', "line 2: '1 1' is not `sentence source target"),
    ('1 1 1 S\n1 1 1 X\n', "line 2: '1 1 1 X' is not"),
    ('1 1 1 S\n0-0\n', "line 2: '0-0' is not"),
    ('1 0 1 S\n', "line 1: '1 0 1 S' has a 0, expected numbers from 1"),
    ('0 1 1\n', 'line 1: .* has a 0'),
    ('0-0\n0-1 1-x\n', "line 2: '1-x' is not a link; expected i-j or ipj"),
    ('0-0\n-1-1\n', "line 2: '-1-1' is not a link"),
    ('0-0\n1 1 1 S\n', "line 2: '1' is not a link"),
])  # fmt: skip
def test_errors_name_file_and_line(tmp_path, text, message):
    path = write(tmp_path / 'a.txt', text)
    for read in (read_gold_links, read_links):
        with pytest.raises(UserError, match=r'a\.txt, ' + message):
            read(path)


def test_written_links_are_read_back(tmp_path):
    sentences = [{(0, 0), (10, 2), (9, 2)}, set(), {(1, 0)}, set()]
    write_links(tmp_path / 'a', sentences)
    assert (tmp_path / 'a').read_bytes() == b'0-0 9-2 10-2\n\n1-0\n\n'
    assert list(read_links(tmp_path / 'a').values()) == sentences


def test_a_sure_link_must_be_possible():
    with pytest.raises(ValueError, match='sure links that are not possible'):
        GoldLinks(frozenset({(0, 0)}), frozenset())


# Scores


def test_scores_match_hand_computed_values():
    # Och and Ney 2003: |A| = 4, |S| = 3, |A & S| = 2, |A & P| = 3.
    gold = links({(0, 0), (1, 1), (2, 2)}, {(1, 2), (3, 3)})
    predicted = {(0, 0), (1, 1), (1, 2), (4, 4)}
    assert alignment_error_rate([predicted], [gold]) == pytest.approx((1 - 5 / 7, 3 / 4, 2 / 3))
    assert alignment_error_rate([set()], [gold]) == (1, 1, 0)
    assert alignment_error_rate([{(9, 9)}], [gold]) == (1, 0, 0)
    assert alignment_error_rate([{(1, 2)}], [gold]) == pytest.approx((1 - 1 / 4, 1, 0))


def test_counts_are_summed_over_the_corpus():
    gold = [links({(0, 0)}), links({(i, i) for i in range(9)})]
    predicted = [{(0, 1)}, {(i, i) for i in range(9)}]
    assert alignment_error_rate(predicted, gold) == pytest.approx((1 - 18 / 20, 0.9, 0.9))  # not a mean: 0.5


def test_zero_divided_by_zero_counts_as_one():
    assert alignment_error_rate([], []) == AlignmentScores(aer=0, precision=1, recall=1)
    assert alignment_error_rate([set()], [links(())]) == (0, 1, 1)
    assert alignment_error_rate([set()], [links((), {(0, 0)})]) == (0, 1, 1)
    assert alignment_error_rate([{(0, 0)}], [links(())]) == (1, 0, 1)
    with pytest.raises(ValueError, match='links for 1 sentences, gold for 0'):
        alignment_error_rate([set()], [])


def test_scores_match_a_count_of_single_links():
    draw = random.Random(0)
    cells = list(itertools.product(range(4), range(3)))
    for _ in range(50):
        corpus = [[draw.choice('-spASP') for _ in cells] for _ in range(3)]  # upper case: also in the predicted links
        marked = [list(zip(cells, row, strict=True)) for row in corpus]
        gold = [links({c for c, k in row if k in 'sS'}, {c for c, k in row if k in 'pP'}) for row in marked]
        predicted = [{c for c, k in row if k.isupper()} for row in marked]
        kinds = ''.join(itertools.chain(*corpus))
        a, s = sum(map(str.isupper, kinds)), kinds.lower().count('s')
        a_s, a_p = kinds.count('S'), kinds.count('S') + kinds.count('P')
        expected = (1 - (a_s + a_p) / (a + s), a_p / a, a_s / s)
        assert alignment_error_rate(predicted, gold) == pytest.approx(expected)


# Files against files


def test_formats_may_be_mixed_and_gold_may_be_a_subset(tmp_path):
    naacl = write(tmp_path / 'gold.naacl', '2 1 2 S\n2 2 1 P\n4 1 1 S\n')
    pharaoh = write(tmp_path / 'links', '9-9\n0-1 1-0\n5-5\n0-0\n')
    assert score_alignment_files(naacl, pharaoh) == (0, 1, 1)
    assert score_alignment_files(naacl, naacl) == (0, 1, 1)
    assert score_alignment_files(pharaoh, pharaoh) == (0, 1, 1)
    assert score_alignment_files(pharaoh, naacl) == pytest.approx(
        (1 - 6 / 8, 1, 3 / 5)
    )  # NAACL gold leaves out sentences 1 and 3


def test_each_file_is_read_once_so_a_pipe_works(tmp_path):
    text, paths = b'1 1 1 S\n2 1 2 S\n', [tmp_path / 'gold', tmp_path / 'links']
    for path in paths:
        os.mkfifo(path)
        threading.Thread(target=path.write_bytes, args=[text], daemon=True).start()
    assert score_alignment_files(*paths) == (0, 1, 1)


def test_swap_exchanges_source_and_target(tmp_path):
    gold = write(tmp_path / 'gold', '0-1 1-2\n')
    reverse = write(tmp_path / 'links', '1-0 2-1\n')
    assert score_alignment_files(gold, reverse).aer == 1
    assert score_alignment_files(gold, reverse, swap=True).aer == 0


@pytest.mark.parametrize(('gold', 'predicted', 'message'), [
    ('0-0\n0-0\n0-0\n', '0-0\n0-0\n', 'ends at sentence 2, .*gold at sentence 3; expected the same'),
    ('0-0\n', '0-0\n0-0\n', 'ends at sentence 2, .*gold at sentence 1'),
    ('0-0\n', '0-0\n\n', 'ends at sentence 2, .*gold at sentence 1'),
    ('0-0\n', '7 1 1 S\n', 'ends at sentence 7, .*gold at sentence 1'),
    ('0-0\n0-0\n', '1 1 1 S\n', 'ends at sentence 1, .*gold at sentence 2'),
    ('7 1 1 S\n', '0-0\n', 'ends at sentence 1, .*gold at sentence 7'),
    ('1 1 1 S\n', '0-0\n0-0\n', 'ends at sentence 2, .*gold at sentence 1'),
    ('7 1 1 S\n', '', 'ends at sentence 0, .*gold at sentence 7'),
    ('7 1 1 S\n', '8 1 1 S\n', 'ends at sentence 8, .*gold at sentence 7'),
    ('8 1 1 S\n', '7 1 1 S\n', 'ends at sentence 7, .*gold at sentence 8'),
])  # fmt: skip
def test_files_that_end_at_different_sentences_are_not_scored(tmp_path, gold, predicted, message):
    with pytest.raises(UserError, match=message):
        score_alignment_files(write(tmp_path / 'gold', gold), write(tmp_path / 'links', predicted))


@pytest.mark.parametrize(('gold', 'predicted', 'message'), [
    ('', '', 'gold has no links, so there is nothing to score'),
    ('\n\n', '0-0\n0-0\n', 'gold has no links'),
    ('0p0\n', '\n', 'links has no links and .*gold has no sure links'),
])  # fmt: skip
def test_files_without_links_are_not_scored(tmp_path, gold, predicted, message):
    with pytest.raises(UserError, match=message):
        score_alignment_files(write(tmp_path / 'gold', gold), write(tmp_path / 'links', predicted))


def test_links_that_do_not_fit_the_hansards_are_refused(shared, tmp_path):
    gold, trial = (shared('hansards') / f'{split}.en-fr.naacl' for split in ('test', 'trial'))
    write_links(tmp_path / 'links', [{(0, 0)}] * 500)
    for links_, message in ((tmp_path / 'links', '500, .*447'), (trial, '37, .*447')):
        with pytest.raises(UserError, match=message):
            score_alignment_files(gold, links_)
        with pytest.raises(UserError, match='ends at sentence 447'):
            score_alignment_files(links_, gold)


def test_hansards_scores(shared, tmp_path):
    path = shared('hansards') / 'test.en-fr.naacl'
    gold = read_gold_links(path)
    assert sorted(gold) == list(range(1, 448))
    sure = [set(sentence.sure) for sentence in gold.values()]
    possible = [sentence.possible for sentence in gold.values()]
    count = sum(map(len, sure))
    text = path.read_text()
    assert count == len(set(line.rsplit(' ', 1)[0] for line in text.splitlines() if line.endswith('S'))) == 4038
    write_links(tmp_path / 'sure', sure)
    assert score_alignment_files(path, tmp_path / 'sure') == (0, 1, 1)
    assert alignment_error_rate(possible, list(gold.values())) == (0, 1, 1)
    removed = next(s for s in sure if s).pop()
    assert removed not in sure[0]
    assert alignment_error_rate(sure, list(gold.values())) == pytest.approx(
        (1 - (2 * (count - 1)) / (2 * count - 1), 1, 1 - 1 / count)
    )
    assert score_alignment_files(path, tmp_path / 'sure', swap=True).aer > 0.5
    sides = [read_lines(path.with_name(f'test.en-fr.{language}')) for language in ('en', 'fr')]
    for links_, english, french in zip(gold.values(), *sides, strict=True):
        assert all(i < len(english.split()) and j < len(french.split()) for i, j in links_.possible)
