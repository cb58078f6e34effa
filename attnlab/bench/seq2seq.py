"""Training steps of the recurrent sequence-to-sequence model in attnlab and in PyTorch."""

import functools
from collections.abc import Callable
from statistics import median
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.bench import steps, torch_training
from attnlab.bench.timing import describe_hardware, time_interleaved
from attnlab.configs import RecurrentConfig
from attnlab.data.vocabulary import BOS, EOS
from attnlab.kernels.losses import LossSums, cross_entropy
from attnlab.models.recurrent import RecurrentSeq2Seq

AttentionName = Literal['additive', 'dot', 'none']
ATTENTIONS: tuple[AttentionName, ...] = ('additive', 'dot', 'none')
LABEL_SMOOTHING = 0.1
PACKAGES = ('jax', 'flax', 'torch')


class Seq2SeqSizes(NamedTuple):
    """Sizes of experiments/align/multi30k_gru.py; width: sequence length of its typical batch."""

    vocabulary: int = 6000
    embedding: int = 128
    hidden: int = 256
    batch: int = 128
    width: int = 16
    dropout: float = 0.3


def main() -> None:
    """Print milliseconds a step, target tokens a second, and the ratio of times, for each attention."""
    measure_seq2seq(Seq2SeqSizes(), rounds=15)


def measure_seq2seq(sizes: Seq2SeqSizes, rounds: int) -> None:
    """Print a table of training steps, with medians of interleaved rounds.

    A step is forward, backward, gradient clipping and Adam on one batch with some padding.  Both frameworks start from
    the same weights; their losses are compared before they are timed.  PyTorch runs eagerly, with its default number of
    threads.
    """
    from attnlab.bench import seq2seq_torch as peer

    arrays = random_batch(sizes)
    tokens = int(np.sum(arrays[2] != 0))
    print(describe_hardware(PACKAGES))
    threads = peer.torch.get_num_threads()
    print(f'PyTorch eager on {threads} threads; {tokens} target tokens in {arrays[2].size} positions')
    print(f'{"attention":<10}{"attnlab":>18}{"PyTorch":>25}{"ratio":>12}')
    for attention in ATTENTIONS:
        functions = seq2seq_training_steps(sizes, attention, arrays)
        measured = time_interleaved(functions, rounds, settle=0.3)
        times = {name: median(step_seconds) for name, step_seconds in measured.items()}
        cells = (f'{1e3 * seconds:8.1f} ms {tokens / seconds:8.0f} tok/s' for seconds in times.values())
        print(f'{attention:<10}', *cells, f'{times["PyTorch"] / times["attnlab"]:6.2f}')


def random_batch(sizes: Seq2SeqSizes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return source, decoder inputs and labels, each [B, width] int32.

    The rows have 11 to 16 tokens if the width is 16, with EOS last, and are padded with 0.
    """
    random = np.random.default_rng(0)
    sides = []
    for _ in range(2):
        lengths = random.integers(sizes.width * 2 // 3 + 1, sizes.width + 1, (sizes.batch, 1))
        tokens, position = random.integers(4, sizes.vocabulary, (sizes.batch, sizes.width)), np.arange(sizes.width)
        ends = np.where(position == lengths - 1, EOS, 0)
        sides.append(np.where(position < lengths - 1, tokens, ends).astype(np.int32))
    source, labels = sides
    inputs = np.where(labels == 0, 0, np.roll(labels, 1, axis=1))
    inputs[:, 0] = BOS
    return source, inputs, labels


def seq2seq_training_steps(
    sizes: Seq2SeqSizes, attention: AttentionName, arrays: tuple[np.ndarray, ...]
) -> dict[str, Callable[[], float]]:
    """Return the training step of each framework; raise RunError if they have different losses."""
    from attnlab.bench import seq2seq_torch as peer

    V, embedding, hidden, *_, dropout = sizes
    config = RecurrentConfig(embedding=embedding, hidden=hidden, attention=attention, dropout=dropout)
    model = RecurrentSeq2Seq(V, V, config)
    torch_model = peer.Seq2Seq(V, V, 'gru', embedding, hidden, 1, True, False, attention, dropout)
    params = jax.jit(model.init)(jax.random.key(0), *arrays[:2])['params']
    peer.load_parameters(torch_model, params)
    loss, tensors = functools.partial(peer.loss, smoothing=LABEL_SMOOTHING), peer.to_tensors(arrays)
    torch_loss = torch_training.evaluate_loss(torch_model, loss, tensors)
    steps.check_same_loss(seq2seq_loss(model, dropout=False), params, arrays, torch_loss)
    return {
        'attnlab': steps.attnlab_training_step(seq2seq_loss(model), params, arrays),
        'PyTorch': torch_training.torch_training_step(torch_model, loss, tensors),
    }


def seq2seq_loss(model: RecurrentSeq2Seq, dropout: bool = True) -> steps.LossFunction:
    """Return a loss function of batches (source, inputs, labels): label-smoothed cross-entropy over all labels."""

    def loss(params: Any, batch: Any, rng: jax.Array) -> LossSums:
        source, inputs, labels = batch
        logits, _ = model.apply({'params': params}, source, inputs, not dropout, rngs={'dropout': rng})
        return cross_entropy(logits, jnp.asarray(labels), LABEL_SMOOTHING)

    return loss
