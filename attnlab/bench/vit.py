"""A training step of the Vision Transformer beside the same step in PyTorch, where the time goes, and the input."""

from collections.abc import Callable, Sequence
from itertools import count
from statistics import median
from typing import Any, NamedTuple

import jax
import numpy as np

from attnlab.bench import steps
from attnlab.bench.timing import time_interleaved
from attnlab.configs import Cifar10Data, VitConfig
from attnlab.data.images import CIFAR_SIDE, Images
from attnlab.models.vision import VisionTransformer
from attnlab.tasks.vision import dataset


class VitSizes(NamedTuple):
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


LARGER = VitSizes(width=256, layers=6, mlp_width=1024, batch=64)


def main() -> None:
    """Prints images a second of each side, ratios, and shares of our training step, for a small and a larger model;
    and images a second that batches are made of."""
    measure_vit((VitSizes(), LARGER), rounds=9, seconds=20.0)
    print(measure_input_speed(VitSizes().batch, rounds=9, seconds=20.0))


def measure_vit(models: Sequence[VitSizes], rounds: int, seconds: float) -> None:
    """One table a model: medians of interleaved rounds, none begun after `seconds` a row; then `steps.print_profile`.

    A step is forward, backward, clipping and Adam on one batch of images that lie in memory.  All sides start from the
    same weights, and must agree on the loss there before they are timed.  The machine has to be quiet.
    """
    from attnlab.bench import vit_torch as peer

    print(steps.opening_lines(peer.torch))
    for sizes in models:
        model, params, arrays = create_vit(sizes)
        print(steps.table_header(sizes._asdict(), 'images a second'))
        functions, missing = vit_training_steps(sizes, model, params, arrays)
        times = time_interleaved(functions, rounds, seconds=seconds, settle=0.3)
        print(steps.table_row('training', sizes.batch, times), flush=True)
        for reason in missing:
            print(f'-: {reason}')
        steps.print_profile(steps.model_loss(model), params, arrays, vit_product_shapes(sizes), rounds, seconds)


def create_vit(sizes: VitSizes) -> tuple[VisionTransformer, Any, tuple[np.ndarray, np.ndarray]]:
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


def vit_training_steps(
    sizes: VitSizes, model: VisionTransformer, params: Any, arrays: tuple[np.ndarray, ...]
) -> tuple[dict[str, Callable[[], float]], list[str]]:
    """As `steps.training_steps`."""
    from attnlab.bench import vit_torch as peer

    def other() -> Any:
        made = peer.VisionTransformer(
            sizes.side, sizes.patch, sizes.width, sizes.layers, sizes.heads, sizes.mlp_width, sizes.classes
        )
        peer.load_parameters(made, params)
        return made

    return steps.training_steps(steps.model_loss(model), params, arrays, other, peer.loss, peer.to_tensors(arrays))


def vit_product_shapes(sizes: VitSizes) -> steps.ProductShapes:
    """Shapes of both sides of each matrix product of the forward pass."""
    B, D, T = sizes.batch, sizes.width, (sizes.side // sizes.patch) ** 2
    patch = 3 * sizes.patch**2
    blocks = steps.block_product_shapes(B, T, D, sizes.heads, sizes.mlp_width) * sizes.layers
    return [((B * T, patch), (patch, D)), *blocks, ((B, D), (D, sizes.classes))]


# The input

BATCHES_PER_TIMING = 20
"""Made in a row to be timed once."""

INPUT_PIPELINES = {
    'crop, flip': Cifar10Data(crop=4, flip=True),
    'and trivial': Cifar10Data(crop=4, flip=True, policy='trivial'),
    'and rand, erase, mix': Cifar10Data(
        crop=4, flip=True, policy='rand', strength=0.9, erase=0.25, mixup=0.8, cutmix=1.0
    ),
}


def measure_input_speed(B: int, rounds: int, seconds: float) -> str:
    """Images a second that batches are made of, by what is done to them: a table, from 50,000 images of noise."""
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (50_000, CIFAR_SIDE, CIFAR_SIDE, 3), np.uint8)
    whole = Images(pixels, random.integers(0, 10, len(pixels), np.int32), tuple('0123456789'))

    def maker(changes: Cifar10Data) -> Callable[[], None]:
        batch, turns = dataset.build_batch_function(changes, whole, B, seed=0), count()

        def make() -> None:
            for _ in range(BATCHES_PER_TIMING):
                batch(next(turns))

        return make

    times = time_interleaved(
        {name: maker(changes) for name, changes in INPUT_PIPELINES.items()}, rounds, seconds=seconds
    )
    rows = [f'{name:<24}{BATCHES_PER_TIMING * B / median(each):18,.0f}' for name, each in times.items()]
    return '\n'.join([f'\nbatches of {B} for CIFAR', f'{"made in NumPy":<24}{"images a second":>18}', *rows])
