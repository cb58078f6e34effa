"""The sequence-to-sequence benchmark, at tiny sizes."""

import numpy as np
import pytest

from attnlab.bench import seq2seq
from attnlab.errors import RunError

TINY = seq2seq.Seq2SeqSizes(vocabulary=20, embedding=4, hidden=3, batch=4, width=6, dropout=0.1)


def test_the_batch_is_shifted_and_padded():
    source, inputs, labels = seq2seq.random_batch(TINY)
    for side in (source, labels):
        lengths = np.sum(side != 0, axis=1)
        assert side.shape == (4, 6) and side.max() < 20 and set(lengths) <= {5, 6} and 5 in lengths
        assert np.all(side[np.arange(4), lengths - 1] == seq2seq.EOS)
    assert np.all(inputs[:, 0] == seq2seq.BOS)
    for row, label in zip(inputs, labels, strict=True):
        count = np.sum(label != 0)
        assert row[1:count].tolist() == label[: count - 1].tolist() and not np.any(row[count:])


@pytest.mark.peers
def test_the_table_has_both_frameworks_for_every_attention(capsys):
    seq2seq.measure_seq2seq(TINY, rounds=2)
    machine, threads, head, *rows = capsys.readouterr().out.splitlines()
    assert 'torch' in machine and 'PyTorch eager' in threads
    assert head.split() == ['attention', 'attnlab', 'PyTorch', 'ratio']
    assert [row.split()[0] for row in rows] == list(seq2seq.ATTENTIONS)
    for row in rows:
        ours, our_rate, theirs, their_rate, ratio = (float(cell) for cell in row.split()[1:] if cell[0].isdigit())
        assert ratio == pytest.approx(theirs / ours, abs=0.05, rel=0.1)
        assert our_rate / their_rate == pytest.approx(theirs / ours, rel=0.1)


@pytest.mark.peers
@pytest.mark.parametrize('attention', seq2seq.ATTENTIONS)
def test_both_frameworks_have_the_same_losses(attention):
    losses = {
        name: [step() for _ in range(4)]
        for name, step in seq2seq.seq2seq_training_steps(
            TINY._replace(dropout=0.0), attention, seq2seq.random_batch(TINY)
        ).items()
    }
    np.testing.assert_allclose(losses['attnlab'], losses['PyTorch'], rtol=1e-5)
    assert losses['attnlab'][-1] < losses['attnlab'][0]


@pytest.mark.peers
def test_different_losses_are_an_error(monkeypatch):
    from attnlab.bench import seq2seq_torch as peer

    monkeypatch.setattr(peer, 'load_parameters', lambda model, params: None)
    with pytest.raises(RunError, match='the same weights and batch give the loss'):
        seq2seq.seq2seq_training_steps(TINY, 'dot', seq2seq.random_batch(TINY))
