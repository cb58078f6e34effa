"""A training step of the Vision Transformer beside the same step in PyTorch, where the time goes, and the input."""

from collections.abc import Callable, Sequence
from itertools import count
from statistics import median
from typing import Any, NamedTuple

import jax
import numpy as np

from attnlab.bench import steps
from attnlab.bench.timing import interleave
from attnlab.configs import Cifar10Data, VitConfig
from attnlab.data.images import SIDE, Images
from attnlab.models.vision import VisionTransformer
from attnlab.tasks.vision import corpus


class Sizes(NamedTuple):
    """Images of `side` x `side` in patches of `patch` x `patch`, D, L, N, F, classes and B.

    By default a model for CIFAR that a laptop trains.
    """

    side: int = 32
    patch: int = 4
    width: int = 128
    layers: int = 4
    heads: int = 4
    mlp_width: int = 256
    classes: int = 10
    batch: int = 128


LARGER = Sizes(width=256, layers=6, mlp_width=1024, batch=64)


def main() -> None:
    """Prints images a second of each side, ratios, and shares of our training step, for a small and a larger model;
    and images a second that batches are made of."""
    measure((Sizes(), LARGER), rounds=9, seconds=20.0)
    print(inputs(Sizes().batch, rounds=9, seconds=20.0))


def measure(models: Sequence[Sizes], rounds: int, seconds: float) -> None:
    """One table a model: medians of interleaved rounds, none begun after `seconds` a row; then `steps.profile`.

    A step is forward, backward, clipping and Adam on one batch of images that lie in memory.  All sides start from the
    same weights, and must agree on the loss there before they are timed.  The machine has to be quiet.
    """
    from attnlab.bench import vit_torch as peer

    print(steps.opening(peer.torch))
    for sizes in models:
        model, params, arrays = start(sizes)
        print(steps.header(sizes._asdict(), 'images a second'))
        functions, missing = trainers(sizes, model, params, arrays)
        times = interleave(functions, rounds, seconds=seconds, settle=0.3)
        print(steps.row('training', sizes.batch, times), flush=True)
        for reason in missing:
            print(f'-: {reason}')
        steps.profile(steps.loss_of(model), params, arrays, products(sizes), rounds, seconds)


def start(sizes: Sizes) -> tuple[VisionTransformer, Any, tuple[np.ndarray, np.ndarray]]:
    """A model, its parameters, and a batch of noise [B, side, side, 3] float32 with labels [B] int32."""
    both = sizes.side, sizes.side
    config = VitConfig(
        image=both, patch=(sizes.patch, sizes.patch), layers=sizes.layers, width=sizes.width, heads=sizes.heads,
        mlp_width=sizes.mlp_width, init=0.0, scaled_init=False,
    )  # fmt: skip
    model = VisionTransformer(sizes.classes, config)
    random = np.random.default_rng(0)
    images = random.normal(size=(sizes.batch, *both, 3)).astype(np.float32)
    labels = random.integers(0, sizes.classes, sizes.batch).astype(np.int32)
    params = jax.jit(model.init)(jax.random.key(0), images)['params']
    return model, params, (images, labels)


def trainers(
    sizes: Sizes, model: VisionTransformer, params: Any, arrays: tuple[np.ndarray, ...]
) -> tuple[dict[str, Callable[[], float]], list[str]]:
    """As `steps.trainers`."""
    from attnlab.bench import vit_torch as peer

    def other() -> Any:
        made = peer.VisionTransformer(
            sizes.side, sizes.patch, sizes.width, sizes.layers, sizes.heads, sizes.mlp_width, sizes.classes
        )
        peer.load(made, params)
        return made

    return steps.trainers(steps.loss_of(model), params, arrays, other, peer.loss, peer.tensors(arrays))


def products(sizes: Sizes) -> steps.Shapes:
    """Shapes of both sides of each matrix product of the forward pass."""
    B, D, T = sizes.batch, sizes.width, (sizes.side // sizes.patch) ** 2
    patch = 3 * sizes.patch**2
    blocks = steps.block_products(B, T, D, sizes.heads, sizes.mlp_width) * sizes.layers
    return [((B * T, patch), (patch, D)), *blocks, ((B, D), (D, sizes.classes))]


# The input

BATCHES = 20
"""Made in a row to be timed once."""

INPUTS = {
    'crop, flip': Cifar10Data(crop=4, flip=True),
    'and trivial': Cifar10Data(crop=4, flip=True, policy='trivial'),
    'and rand, erase, mix': Cifar10Data(
        crop=4, flip=True, policy='rand', strength=0.9, erase=0.25, mixup=0.8, cutmix=1.0
    ),
}


def inputs(B: int, rounds: int, seconds: float) -> str:
    """Images a second that batches are made of, by what is done to them: a table, from 50,000 images of noise."""
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (50_000, SIDE, SIDE, 3), np.uint8)
    whole = Images(pixels, random.integers(0, 10, len(pixels), np.int32), tuple('0123456789'))

    def maker(changes: Cifar10Data) -> Callable[[], None]:
        batch, turns = corpus.batch_of(changes, whole, B, seed=0), count()

        def make() -> None:
            for _ in range(BATCHES):
                batch(next(turns))

        return make

    times = interleave({name: maker(changes) for name, changes in INPUTS.items()}, rounds, seconds=seconds)
    rows = [f'{name:<24}{BATCHES * B / median(each):18,.0f}' for name, each in times.items()]
    return '\n'.join([f'\nbatches of {B} for CIFAR', f'{"made in NumPy":<24}{"images a second":>18}', *rows])
