"""The Vision Transformer in attnlab and in PyTorch: training steps, a profile of a step, and the input pipeline."""

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
    """Images of `side` x `side` pixels, patches of `patch` x `patch` pixels, D, L, N, F, classes and B.

    The defaults are a model for CIFAR that a laptop can train.
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
    """Print images a second of each framework, ratios, and a profile of a step, for a small and a larger model.

    Then print images a second of the input pipelines.
    """
    measure_vit((VitSizes(), LARGER), rounds=9, seconds=20.0)
    print(measure_input_speed(VitSizes().batch, rounds=9, seconds=20.0))


def measure_vit(models: Sequence[VitSizes], rounds: int, seconds: float) -> None:
    """Print a table for each model, with medians of interleaved rounds, and a profile by `steps.print_profile`.

    A step is forward, backward, gradient clipping and Adam on one batch of images in memory.  All frameworks start from
    the same weights; their losses are compared before they are timed.  The machine must be idle.

    rounds: most rounds of a row.  seconds: time of a row after which no further round begins.
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
    """Return a model, its parameters, and a batch: noise images [B, side, side, 3] float32 and labels [B] int32."""
    image = sizes.side, sizes.side
    config = VitConfig(
        image=image, patch=(sizes.patch, sizes.patch), layers=sizes.layers, width=sizes.width, heads=sizes.heads,
        mlp_width=sizes.mlp_width, init=0.0, scaled_init=False,
    )  # fmt: skip
    model = VisionTransformer(sizes.classes, config)
    random = np.random.default_rng(0)
    images = random.normal(size=(sizes.batch, *image, 3)).astype(np.float32)
    labels = random.integers(0, sizes.classes, sizes.batch).astype(np.int32)
    params = jax.jit(model.init)(jax.random.key(0), images)['params']
    return model, params, (images, labels)


def vit_training_steps(
    sizes: VitSizes, model: VisionTransformer, params: Any, arrays: tuple[np.ndarray, ...]
) -> tuple[dict[str, Callable[[], float]], list[str]]:
    """Return the result of `steps.training_steps` for this model."""
    from attnlab.bench import vit_torch as peer

    def make_torch_model() -> Any:
        torch_model = peer.VisionTransformer(
            sizes.side, sizes.patch, sizes.width, sizes.layers, sizes.heads, sizes.mlp_width, sizes.classes
        )
        peer.load_parameters(torch_model, params)
        return torch_model

    loss, tensors = steps.model_loss(model), peer.to_tensors(arrays)
    return steps.training_steps(loss, params, arrays, make_torch_model, peer.loss, tensors)


def vit_product_shapes(sizes: VitSizes) -> steps.ProductShapes:
    """Return the shapes of both operands of each matrix product of the forward pass."""
    B, D, T = sizes.batch, sizes.width, (sizes.side // sizes.patch) ** 2
    patch_size = 3 * sizes.patch**2
    blocks = steps.block_product_shapes(B, T, D, sizes.heads, sizes.mlp_width) * sizes.layers
    return [((B * T, patch_size), (patch_size, D)), *blocks, ((B, D), (D, sizes.classes))]


# The input pipeline

BATCHES_PER_TIMING = 20
"""Batches that one timed call makes."""

INPUT_PIPELINES = {
    'crop, flip': Cifar10Data(crop=4, flip=True),
    'and trivial': Cifar10Data(crop=4, flip=True, policy='trivial'),
    'and rand, erase, mix': Cifar10Data(
        crop=4, flip=True, policy='rand', strength=0.9, erase=0.25, mixup=0.8, cutmix=1.0
    ),
}


def measure_input_speed(B: int, rounds: int, seconds: float) -> str:
    """Return a table of images a second of each input pipeline, for batches of B from 50,000 noise images."""
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (50_000, CIFAR_SIDE, CIFAR_SIDE, 3), np.uint8)
    images = Images(pixels, random.integers(0, 10, len(pixels), np.int32), tuple('0123456789'))

    def batch_maker(config: Cifar10Data) -> Callable[[], None]:
        make_batch, step = dataset.build_batch_function(config, images, B, seed=0), count()

        def make_batches() -> None:
            for _ in range(BATCHES_PER_TIMING):
                make_batch(next(step))

        return make_batches

    functions = {name: batch_maker(config) for name, config in INPUT_PIPELINES.items()}
    times = time_interleaved(functions, rounds, seconds=seconds)
    image_count = BATCHES_PER_TIMING * B
    rows = [f'{name:<24}{image_count / median(call_seconds):18,.0f}' for name, call_seconds in times.items()]
    return '\n'.join([f'\nbatches of {B} for CIFAR', f'{"made in NumPy":<24}{"images a second":>18}', *rows])
