"""A training step of the recurrent model beside the same step in PyTorch."""

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
    """Those of experiments/align/multi30k_gru.py, at the width of its typical batch."""

    vocabulary: int = 6000
    embedding: int = 128
    hidden: int = 256
    batch: int = 128
    width: int = 16
    dropout: float = 0.3


def main() -> None:
    """Prints milliseconds a step, target tokens a second and the ratio, for each attention."""
    measure_seq2seq(Seq2SeqSizes(), rounds=15)


def measure_seq2seq(sizes: Seq2SeqSizes, rounds: int) -> None:
    """One step is forward, backward, clipping and Adam, on one batch with some padding.

    Both start from the same weights, and must agree on the loss there before either is timed.
    PyTorch runs eagerly, on as many threads as it takes by itself.
    """
    from attnlab.bench import seq2seq_torch as peer

    arrays = random_batch(sizes)
    tokens = int(np.sum(arrays[2] != 0))
    print(describe_hardware(PACKAGES))
    print(f'PyTorch eager on {peer.torch.get_num_threads()} threads; {tokens} target tokens in {arrays[2].size} places')
    print(f'{"attention":<10}{"attnlab":>18}{"PyTorch":>25}{"ratio":>12}')
    for attention in ATTENTIONS:
        functions = seq2seq_training_steps(sizes, attention, arrays)
        times = {name: median(each) for name, each in time_interleaved(functions, rounds, settle=0.3).items()}
        cells = (f'{1e3 * seconds:8.1f} ms {tokens / seconds:8.0f} tok/s' for seconds in times.values())
        print(f'{attention:<10}', *cells, f'{times["PyTorch"] / times["attnlab"]:6.2f}')


def random_batch(sizes: Seq2SeqSizes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Source, decoder inputs and labels, [B, width] int32, of 11 to 16 tokens in 16 places, EOS last."""
    random = np.random.default_rng(0)
    sides = []
    for _ in range(2):
        lengths = random.integers(sizes.width * 2 // 3 + 1, sizes.width + 1, (sizes.batch, 1))
        tokens, at = random.integers(4, sizes.vocabulary, (sizes.batch, sizes.width)), np.arange(sizes.width)
        sides.append(np.where(at < lengths - 1, tokens, np.where(at == lengths - 1, EOS, 0)).astype(np.int32))
    source, labels = sides
    inputs = np.where(labels == 0, 0, np.roll(labels, 1, axis=1))
    inputs[:, 0] = BOS
    return source, inputs, labels


def seq2seq_training_steps(
    sizes: Seq2SeqSizes, attention: AttentionName, arrays: tuple[np.ndarray, ...]
) -> dict[str, Callable[[], float]]:
    """The two training steps, by name; raises RunError if they are not the same computation."""
    from attnlab.bench import seq2seq_torch as peer

    V, embedding, hidden, *_, dropout = sizes
    config = RecurrentConfig(embedding=embedding, hidden=hidden, attention=attention, dropout=dropout)
    model = RecurrentSeq2Seq(V, V, config)
    other = peer.Seq2Seq(V, V, 'gru', embedding, hidden, 1, True, False, attention, dropout)
    params = jax.jit(model.init)(jax.random.key(0), *arrays[:2])['params']
    peer.load_parameters(other, params)
    loss, tensors = functools.partial(peer.loss, smoothing=LABEL_SMOOTHING), peer.to_tensors(arrays)
    steps.check_same_loss(
        seq2seq_loss(model, noise=False), params, arrays, torch_training.evaluate_loss(other, loss, tensors)
    )
    return {
        'attnlab': steps.attnlab_training_step(seq2seq_loss(model), params, arrays), 'PyTorch': torch_training.torch_training_step(other, loss, tensors),
    }  # fmt: skip


def seq2seq_loss(model: RecurrentSeq2Seq, noise: bool = True) -> steps.LossFunction:
    """The mean over a batch (source, inputs, labels), with dropout or without."""

    def loss(params: Any, batch: Any, rng: jax.Array) -> LossSums:
        source, inputs, labels = batch
        logits, _ = model.apply({'params': params}, source, inputs, not noise, rngs={'dropout': rng})
        return cross_entropy(logits, jnp.asarray(labels), LABEL_SMOOTHING)

    return loss
