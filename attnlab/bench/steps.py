"""Training steps to be timed: one of ours on one batch, PyTorch's beside it, and where the time of ours goes."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from attnlab.bench import torch_training
from attnlab.bench.timing import describe_hardware, time_interleaved
from attnlab.bench.torch_training import GRADIENT_CLIP, LEARNING_RATE
from attnlab.configs.run import OptimizerConfig, RunConfig, TrainConfig
from attnlab.errors import RunError
from attnlab.kernels.losses import LossSums, cross_entropy
from attnlab.train.setup import Setup, make_setup
from attnlab.train.step import LossFunction

SIDES = ('attnlab', 'PyTorch eager', 'PyTorch compiled')

ProductShapes = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
"""Both sides of each matrix product."""


def training_setup() -> Setup:
    """The training of every side: clipping and Adam at a constant rate, on one device."""
    adam = OptimizerConfig(learning_rate=LEARNING_RATE, clip=GRADIENT_CLIP, schedule='constant', warmup='0 steps')
    return make_setup(RunConfig(optimizer=adam, train=TrainConfig(batch_size=1, mesh='data=1')), examples=1)


def model_loss(model: Any) -> LossFunction:
    """The mean cross-entropy over all labels of a batch (inputs, labels)."""

    def loss(params: Any, batch: Any, rng: jax.Array) -> LossSums:
        inputs, labels = batch
        return cross_entropy(model.apply({'params': params}, inputs)[0], labels, padding=-1)  # every label counts

    return loss


def attnlab_training_step(loss: LossFunction, params: Any, batch: Any) -> Callable[[], float]:
    """A function that trains by one step of the loop on the batch and returns the loss before it."""
    ours = training_setup()
    state = ours.layout.initialize(partial(ours.initial_state, lambda rng: params), np.uint32(0), params)
    update = ours.compile_step(loss, state)

    def step() -> float:
        nonlocal state
        state, values = update(state, batch)
        jax.block_until_ready(state)
        return float(values['loss'])

    return step


def check_same_loss(loss: LossFunction, params: Any, batch: Any, theirs: float) -> None:
    """Raises RunError unless PyTorch has the same loss."""
    sums = jax.jit(loss)(params, batch, jax.random.key(0))
    ours = float(sums.total / sums.weight)
    if not abs(ours - theirs) <= 1e-5 * abs(theirs):
        raise RunError(f'the same weights and batch give the loss {ours:.6f} here and {theirs:.6f} in PyTorch')


def training_steps(
    loss: LossFunction,
    params: Any,
    batch: Any,
    other: Callable[[], Any],
    their_loss: Callable[..., Any],
    theirs: Sequence[Any],
) -> tuple[dict[str, Callable[[], float]], list[str]]:
    """The training steps by side, and why one is missing; raises RunError if they are not the same computation.

    other: makes PyTorch's model with our parameters.  their_loss, theirs: of that model and the batch as tensors.
    """
    check_same_loss(loss, params, batch, torch_training.evaluate_loss(other(), their_loss, theirs))
    functions, missing = {SIDES[0]: attnlab_training_step(loss, params, batch)}, []
    for side, compiled in zip(SIDES[1:], (False, True), strict=True):
        try:
            functions[side] = torch_training.torch_training_step(other(), their_loss, theirs, compiled)
        except RunError as error:  # it does not compile here
            missing.append(str(error))
    return functions, missing


def opening_lines(torch: Any) -> str:
    """The machine, and how sides compare."""
    how = f'PyTorch on {torch.get_num_threads()} threads, its Adam fused; a ratio is its time by that of attnlab'
    return f'{describe_hardware(("jax", "flax", "torch"))}\n{how}'


def table_header(sizes: Mapping[str, int], what: str) -> str:
    """What a table of `table_row`s is of, and its first line."""
    of = ', '.join(f'{name} {value}' for name, value in sizes.items())
    return f'\n{of}\n' + ' '.join([f'{what:<18}', *(f'{side:>18}' for side in SIDES), f'{"ratios":>14}'])


def table_row(work: str, things: int, times: Mapping[str, Sequence[float]]) -> str:
    """Things a second of each side, and their times by ours."""
    medians = {name: median(each) for name, each in times.items()}
    rates = (f'{things / medians[side]:,.0f}' if side in medians else '-' for side in SIDES)
    ratios = (f'{medians[side] / medians[SIDES[0]]:.2f}' if side in medians else '-' for side in SIDES[1:])
    return ' '.join([f'{work:<18}', *(f'{rate:>18}' for rate in rates), *(f'{ratio:>7}' for ratio in ratios)])


# Where our step's time goes


def print_profile(
    loss: LossFunction, params: Any, batch: Any, products: ProductShapes, rounds: int, seconds: float
) -> None:
    """Prints parts of our training step, each compiled and timed on its own, and their shares of the whole.

    The products are the matrix products of forward and backward and nothing else: what no step can be faster than
    with the compiler's products.
    """
    functions = {'whole step': attnlab_training_step(loss, params, batch), **step_parts(loss, params, batch, products)}
    times = {
        name: median(each) for name, each in time_interleaved(functions, rounds, seconds=seconds, settle=0.3).items()
    }
    whole, both = times['whole step'], times['forward and backward']
    work = 3e-9 * sum(2 * prod(left) * right[-1] for left, right in products)
    rows = {
        **times,
        'backward': both - times['forward'],
        'on top of the products': both - times['products'],
        'beside all parts': whole - both - times['optimizer'],
    }
    print(f'{"a step of attnlab":<24}{"ms":>10}{"share":>8}')
    for name, took in rows.items():
        print(f'{name:<24}{1e3 * took:10.1f}{took / whole:8.0%}' + f'{work / took:9.0f} GF/s' * (name == 'products'))


def step_parts(loss: LossFunction, params: Any, batch: Any, products: ProductShapes) -> dict[str, Callable]:
    """The optimizer's update, the loss, the loss with its gradient, and the products alone."""
    rng = jax.random.key(0)

    def mean(params: Any, batch: Any) -> jax.Array:
        sums = loss(params, batch, rng)
        return sums.total / sums.weight

    forward, both, multiplied = jax.jit(mean), jax.jit(jax.value_and_grad(mean)), jax.jit(run_products)
    operands = product_operands(products)
    return {
        'optimizer': _updater(params),
        'forward': lambda: jax.block_until_ready(forward(params, batch)),
        'forward and backward': lambda: jax.block_until_ready(both(params, batch)),
        'products': lambda: jax.block_until_ready(multiplied(operands)),
    }


def block_product_shapes(B: int, T: int, D: int, N: int, F: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Products of the forward pass of one block; attention's are over all pairs, masked or not."""
    tokens, head = B * T, (B, N, T, D // N)
    attention = [*[((tokens, D), (D, D))] * 4, (head, (B, N, D // N, T)), ((B, N, T, T), head)]
    return [*attention, ((tokens, D), (D, F)), ((tokens, F), (F, D))]


def product_operands(products: ProductShapes) -> list[list[jax.Array]]:
    """Both sides of each product, and the slope of its result."""
    return [[jnp.ones(shape) for shape in (left, right, (*left[:-1], right[-1]))] for left, right in products]


def run_products(operands: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
    """A number of each product's result and gradients: all of them are computed, none is kept."""
    found = []
    for left, right, slope in operands:
        result, pull = jax.vjp(jnp.matmul, left, right)
        found += [x[(0,) * x.ndim] for x in (result, *pull(slope))]
    return found


def _updater(params: Any) -> Callable[[], Any]:
    """A function that clips and applies a gradient, as a training step does."""
    optimize = training_setup().make_optimizer(LEARNING_RATE, 0.0)
    grads = jax.tree.map(lambda x: jnp.full_like(x, 1e-3), params)
    state = jax.tree.map(jnp.copy, (params, optimize.init(params)))

    def update(state: Any, grads: Any) -> Any:
        params, memory = state
        updates, memory = optimize.update(grads, memory, params)
        return optax.apply_updates(params, updates), memory

    update = jax.jit(update, donate_argnums=0)

    def step() -> None:
        nonlocal state
        state = jax.block_until_ready(update(state, grads))

    return step
