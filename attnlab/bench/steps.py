"""Training steps of attnlab and of PyTorch on one batch, and a profile of the step of attnlab."""

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

FRAMEWORKS = ('attnlab', 'PyTorch eager', 'PyTorch compiled')

ProductShapes = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
"""Shapes of the left and right operand of each matrix product."""


def training_setup() -> Setup:
    """Return the training that all frameworks run: gradient clipping and Adam at a constant rate, on one device."""
    adam = OptimizerConfig(learning_rate=LEARNING_RATE, clip=GRADIENT_CLIP, schedule='constant', warmup='0 steps')
    return make_setup(RunConfig(optimizer=adam, train=TrainConfig(batch_size=1, mesh='data=1')), examples=1)


def model_loss(model: Any) -> LossFunction:
    """Return a loss function: cross-entropy over all labels of a batch (inputs, labels)."""

    def loss(params: Any, batch: Any, rng: jax.Array) -> LossSums:
        inputs, labels = batch
        return cross_entropy(model.apply({'params': params}, inputs)[0], labels, padding=-1)  # every label counts

    return loss


def attnlab_training_step(loss: LossFunction, params: Any, batch: Any) -> Callable[[], float]:
    """Return a function that runs one training step on the batch and returns the loss before the step."""
    ours = training_setup()
    state = ours.layout.initialize(partial(ours.initial_state, lambda rng: params), np.uint32(0), params)
    update = ours.compile_step(loss, state)

    def step() -> float:
        nonlocal state
        state, values = update(state, batch)
        jax.block_until_ready(state)
        return float(values['loss'])

    return step


def check_same_loss(loss: LossFunction, params: Any, batch: Any, torch_loss: float) -> None:
    """Raise RunError unless attnlab has the loss that PyTorch has, within a relative difference of 1e-5."""
    sums = jax.jit(loss)(params, batch, jax.random.key(0))
    our_loss = float(sums.total / sums.weight)
    if not abs(our_loss - torch_loss) <= 1e-5 * abs(torch_loss):
        losses = f'{our_loss:.6f} in attnlab and {torch_loss:.6f} in PyTorch'
        raise RunError(f'the same weights and batch give the loss {losses}')


def training_steps(
    loss: LossFunction,
    params: Any,
    batch: Any,
    make_torch_model: Callable[[], Any],
    torch_loss: Callable[..., Any],
    tensors: Sequence[Any],
) -> tuple[dict[str, Callable[[], float]], list[str]]:
    """Return a training step for each framework, and the reasons why others are missing.

    make_torch_model: returns a PyTorch model with the parameters `params`.
    torch_loss: called as torch_loss(model, *tensors).  tensors: the batch.

    Raises RunError if attnlab and PyTorch have different losses.
    """
    check_same_loss(loss, params, batch, torch_training.evaluate_loss(make_torch_model(), torch_loss, tensors))
    functions, missing = {FRAMEWORKS[0]: attnlab_training_step(loss, params, batch)}, []
    for framework, compiled in zip(FRAMEWORKS[1:], (False, True), strict=True):
        try:
            functions[framework] = torch_training.torch_training_step(make_torch_model(), torch_loss, tensors, compiled)
        except RunError as error:  # torch.compile fails on this machine
            missing.append(str(error))
    return functions, missing


def opening_lines(torch: Any) -> str:
    """Return two lines: the machine, and how to read the tables.  torch: the module."""
    note = f'PyTorch on {torch.get_num_threads()} threads, with fused Adam; ratio: its time divided by that of attnlab'
    return f'{describe_hardware(("jax", "flax", "torch"))}\n{note}'


def table_header(sizes: Mapping[str, int], unit: str) -> str:
    """Return the title and the header of a table of `table_row`s.  unit: as in 'tokens a second'."""
    title = ', '.join(f'{name} {value}' for name, value in sizes.items())
    header = [f'{unit:<18}', *(f'{framework:>18}' for framework in FRAMEWORKS), f'{"ratios":>14}']
    return f'\n{title}\n' + ' '.join(header)


def table_row(label: str, count: int, times: Mapping[str, Sequence[float]]) -> str:
    """Return a row with the speed of each framework, and the times of PyTorch divided by the time of attnlab.

    count: items (tokens or images) that one call processes.  times: framework -> seconds of its calls.
    """
    medians = {framework: median(seconds) for framework, seconds in times.items()}
    rates = [f'{count / medians[name]:,.0f}' if name in medians else '-' for name in FRAMEWORKS]
    ratios = [f'{medians[name] / medians[FRAMEWORKS[0]]:.2f}' if name in medians else '-' for name in FRAMEWORKS[1:]]
    return ' '.join([f'{label:<18}', *(f'{rate:>18}' for rate in rates), *(f'{ratio:>7}' for ratio in ratios)])


# Profile of a training step of attnlab


def print_profile(
    loss: LossFunction, params: Any, batch: Any, products: ProductShapes, rounds: int, seconds: float
) -> None:
    """Print the times of the parts of a training step of attnlab, each compiled and timed on its own, and their shares.

    'products' is the time of the matrix products of forward and backward alone: the least time that a step can take
    with the matrix products of the compiler.
    """
    functions = {'whole step': attnlab_training_step(loss, params, batch), **step_parts(loss, params, batch, products)}
    measured = time_interleaved(functions, rounds, seconds=seconds, settle=0.3)
    times = {name: median(part_seconds) for name, part_seconds in measured.items()}
    whole, both = times['whole step'], times['forward and backward']
    gigaflops = 3e-9 * sum(2 * prod(left) * right[-1] for left, right in products)  # forward, and twice that backward
    rows = {
        **times,
        'backward': both - times['forward'],
        'without the products': both - times['products'],
        'rest of the step': whole - both - times['optimizer'],
    }
    print(f'{"a step of attnlab":<24}{"ms":>10}{"share":>8}')
    for name, part_time in rows.items():
        speed = f'{gigaflops / part_time:9.0f} GF/s' if name == 'products' else ''
        print(f'{name:<24}{1e3 * part_time:10.1f}{part_time / whole:8.0%}{speed}')


def step_parts(loss: LossFunction, params: Any, batch: Any, products: ProductShapes) -> dict[str, Callable]:
    """Return functions for the optimizer's update, the loss, the loss with its gradient, and the products alone."""
    rng = jax.random.key(0)

    def mean_loss(params: Any, batch: Any) -> jax.Array:
        sums = loss(params, batch, rng)
        return sums.total / sums.weight

    forward, forward_and_backward = jax.jit(mean_loss), jax.jit(jax.value_and_grad(mean_loss))
    multiply, operands = jax.jit(run_products), product_operands(products)
    return {
        'optimizer': _optimizer_step(params),
        'forward': lambda: jax.block_until_ready(forward(params, batch)),
        'forward and backward': lambda: jax.block_until_ready(forward_and_backward(params, batch)),
        'products': lambda: jax.block_until_ready(multiply(operands)),
    }


def block_product_shapes(B: int, T: int, D: int, N: int, F: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the products of the forward pass of one block; those of attention include masked pairs."""
    tokens, head = B * T, (B, N, T, D // N)
    attention = [*[((tokens, D), (D, D))] * 4, (head, (B, N, D // N, T)), ((B, N, T, T), head)]
    return [*attention, ((tokens, D), (D, F)), ((tokens, F), (F, D))]


def product_operands(products: ProductShapes) -> list[list[jax.Array]]:
    """Return arrays of ones for each product, of its shapes: left operand, right operand, cotangent of the result."""
    return [[jnp.ones(shape) for shape in (left, right, (*left[:-1], right[-1]))] for left, right in products]


def run_products(operands: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
    """Return one element, of shape [], of each product's result and gradients: all are computed and none is kept."""
    elements = []
    for left, right, d_result in operands:
        result, vjp = jax.vjp(jnp.matmul, left, right)
        elements += [x[(0,) * x.ndim] for x in (result, *vjp(d_result))]
    return elements


def _optimizer_step(params: Any) -> Callable[[], Any]:
    """Return a function that clips and applies a gradient, as a training step does."""
    optimize = training_setup().make_optimizer(LEARNING_RATE, 0.0)
    grads = jax.tree.map(lambda x: jnp.full_like(x, 1e-3), params)
    state = jax.tree.map(jnp.copy, (params, optimize.init(params)))

    def update(state: Any, grads: Any) -> Any:
        params, optimizer_state = state
        updates, optimizer_state = optimize.update(grads, optimizer_state, params)
        return optax.apply_updates(params, updates), optimizer_state

    update = jax.jit(update, donate_argnums=0)

    def step() -> None:
        nonlocal state
        state = jax.block_until_ready(update(state, grads))

    return step
