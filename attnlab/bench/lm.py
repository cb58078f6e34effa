"""A causal language model beside the same one in PyTorch: training steps, cached decoding, and where the time goes."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from attnlab.bench.timing import hardware, interleave
from attnlab.decode import cache
from attnlab.decode.sampling import sample
from attnlab.errors import RunError
from attnlab.kernels.losses import Sums, cross_entropy
from attnlab.layers.block import Recipe
from attnlab.models.language import LanguageModel
from attnlab.train import loop, optimizer

CLIP, RATE = 1.0, 1e-3
PROMPT, BATCHES = 16, (1, 8)  # of decoding
PACKAGES = ('jax', 'flax', 'torch')
SIDES = ('attnlab', 'PyTorch eager', 'PyTorch compiled')


class Sizes(NamedTuple):
    """V, D, L, N, T and B; by default those that nanoGPT's README trains on a CPU."""

    vocabulary: int = 65
    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 64
    batch: int = 12


LARGER = Sizes(vocabulary=8192, width=384, layers=6, heads=6, context=256, batch=8)


def main() -> None:
    """Prints tokens a second of each side, ratios, and shares of our training step, for a small and a larger model."""
    measure((Sizes(), LARGER), rounds=15, seconds=10.0)


def measure(models: Sequence[Sizes], rounds: int, seconds: float) -> None:
    """One table a model: medians of interleaved rounds, none begun after `seconds` a row; then `profile`.

    Training is forward, backward, clipping and Adam on one batch; decoding fills the context behind a prompt, greedily.
    Both start from the same weights, and must agree on the loss and on the tokens there before they are timed.
    PyTorch decodes by a loop in Python; only its training is compiled.
    The machine has to be quiet: PyTorch's threads wait for each other in every product, and where another process
    holds a core it loses many times what ours loses.
    """
    from attnlab.bench import lm_torch as peer

    print(hardware(PACKAGES))
    print(f'PyTorch on {peer.torch.get_num_threads()} threads, its Adam fused; a ratio is its time by that of attnlab')
    for sizes in models:
        model, params, arrays = start(sizes)
        print('\n' + ', '.join(f'{name} {value}' for name, value in sizes._asdict().items()))
        print(f'{"tokens a second":<18}', *(f'{side:>18}' for side in SIDES), f'{"ratios":>14}')
        functions, missing = trainers(sizes, model, params, arrays)
        times = interleave(functions, rounds, seconds=seconds)
        print(_row('training', arrays[0].size, times), flush=True)
        for batch in BATCHES:
            prompt = np.random.default_rng(1).integers(0, sizes.vocabulary, (batch, PROMPT)).astype(np.int32)
            functions = decoders(sizes, model, params, prompt)
            times = interleave(functions, rounds, seconds=seconds, check=same_tokens)
            print(_row(f'decoding, batch {batch}', batch * (sizes.context - PROMPT), times), flush=True)
        for reason in missing:
            print(f'-: {reason}')
        profile(sizes, model, params, arrays, rounds, seconds)


def _row(work: str, tokens: int, times: Mapping[str, Sequence[float]]) -> str:
    medians = {name: median(each) for name, each in times.items()}
    rates = (f'{tokens / medians[side]:,.0f}' if side in medians else '-' for side in SIDES)
    ratios = (f'{medians[side] / medians[SIDES[0]]:.2f}' if side in medians else '-' for side in SIDES[1:])
    return ' '.join([f'{work:<18}', *(f'{rate:>18}' for rate in rates), *(f'{ratio:>7}' for ratio in ratios)])


def start(sizes: Sizes) -> tuple[LanguageModel, Any, tuple[np.ndarray, np.ndarray]]:
    """A model, its parameters, and a batch of random tokens as inputs and labels [B, T] int32."""
    model = LanguageModel(
        sizes.vocabulary, sizes.width, sizes.layers, sizes.context, Recipe(heads=sizes.heads, mlp='gelu')
    )  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, sizes.vocabulary, (sizes.batch, sizes.context + 1)).astype(np.int32)
    params = jax.jit(model.init)(jax.random.key(0), tokens[:, :-1])['params']
    return model, params, (tokens[:, :-1], tokens[:, 1:])


def _peer(sizes: Sizes, params: Any) -> Any:
    """PyTorch's model with our parameters."""
    from attnlab.bench import lm_torch as peer

    other = peer.LanguageModel(sizes.vocabulary, sizes.width, sizes.layers, sizes.context, sizes.heads, 'gelu')
    peer.load(other, params)
    return other


# Training


def trainers(
    sizes: Sizes, model: LanguageModel, params: Any, arrays: tuple[np.ndarray, ...]
) -> tuple[dict[str, Callable[[], float]], list[str]]:
    """The training steps by side, and why one is missing; raises RunError if they are not the same computation."""
    from attnlab.bench import lm_torch as peer

    eager, other = _peer(sizes, params), _peer(sizes, params)
    check(model, params, eager, arrays)
    functions = {
        'attnlab': trainer(model, params, arrays),
        'PyTorch eager': peer.trainer(eager, arrays, clip=CLIP, rate=RATE),
    }
    try:
        functions['PyTorch compiled'] = peer.trainer(other, arrays, clip=CLIP, rate=RATE, compiled=True)
    except RunError as error:
        return functions, [str(error)]
    return functions, []


def check(model: LanguageModel, params: Any, other: Any, arrays: tuple[np.ndarray, ...]) -> None:
    """Raises RunError unless both have the same loss."""
    from attnlab.bench import lm_torch as peer

    sums = jax.jit(_loss(model))(params, arrays, jax.random.key(0))
    ours, theirs = float(sums.total / sums.weight), peer.evaluate(other, arrays)
    if not abs(ours - theirs) <= 1e-5 * abs(theirs):
        raise RunError(f'the same weights and batch give the loss {ours:.6f} here and {theirs:.6f} in PyTorch')


def trainer(model: LanguageModel, params: Any, arrays: tuple[np.ndarray, ...]) -> Callable[[], float]:
    """A function that trains by one step of the loop on (inputs, labels) and returns the loss before it."""
    optimize = _optimizer()
    update = jax.jit(loop.make_update(_loss(model), optimize, 0, 1), donate_argnums=0)
    params = jax.tree.map(jnp.copy, params)  # what is donated is gone, and others start from the same
    state = loop.State(jnp.int32(0), params, optimize.init(params))

    def step() -> float:
        nonlocal state
        state, values = update(state, arrays)
        jax.block_until_ready(state)
        return float(values['loss'])

    return step


def _loss(model: LanguageModel) -> Callable[[Any, Any, jax.Array], Sums]:
    def loss(params: Any, batch: Any, rng: jax.Array) -> Sums:
        inputs, labels = batch
        return cross_entropy(model.apply({'params': params}, inputs)[0], labels, padding=-1)  # every label counts

    return loss


def _optimizer() -> optax.GradientTransformation:
    config = dict(name='adam', learning_rate=RATE, b2=0.999, clip=CLIP, weight_decay=0.0)
    return optimizer.build(ConfigDict(config), lambda step: RATE)


# Decoding


def decoders(
    sizes: Sizes, model: LanguageModel, params: Any, prompt: np.ndarray
) -> dict[str, Callable[[], np.ndarray]]:
    """What fills the context behind a prompt [B, P], by side; each returns the tokens [B, T - P]."""
    from attnlab.bench import lm_torch as peer

    other, count = _peer(sizes, params), sizes.context - prompt.shape[1]
    return {
        'attnlab': decoder(model, params, prompt, count),
        'PyTorch eager': lambda: peer.generate(other, prompt, count),
    }


def decoder(model: LanguageModel, params: Any, prompt: np.ndarray, count: int) -> Callable[[], np.ndarray]:
    """A function that returns the `count` most probable tokens after a prompt [B, P], by one compiled program."""

    @jax.jit
    def run(params: Any, prompt: jax.Array) -> jax.Array:
        kept = cache.start(model, params, len(prompt), prompt.shape[1] + count)
        kept, _ = cache.extend(model, params, kept, prompt[:, :-1])
        step, rng = cache.stepper(model, params), jax.random.key(0)  # temperature 0 draws nothing
        return sample(step, kept, prompt[:, -1], rng=rng, limit=count, temperature=0.0).tokens

    return lambda: np.asarray(run(params, prompt))


def same_tokens(found: Mapping[str, np.ndarray]) -> None:
    """Raises RunError unless all sides say the same."""
    first, *others = found
    for name in others:
        apart = np.argwhere(found[first] != found[name])
        if len(apart):
            row, at = apart[np.argmin(apart[:, 1])]
            raise RunError(f'the same weights and prompt: {first} and {name} part in row {row} at token {at}')


# Where a training step's time goes


def profile(
    sizes: Sizes, model: LanguageModel, params: Any, arrays: tuple[np.ndarray, ...], rounds: int, seconds: float
) -> None:
    """Prints parts of our training step, each compiled and timed on its own, and their shares of the whole.

    The products are the matrix products of forward and backward and nothing else: what no step can be faster than
    with the compiler's products.
    """
    functions = {'whole step': trainer(model, params, arrays), **parts(sizes, model, params, arrays)}
    times = {name: median(each) for name, each in interleave(functions, rounds, seconds=seconds).items()}
    whole, both = times['whole step'], times['forward and backward']
    work = 3e-9 * sum(2 * prod(left) * right[-1] for left, right in products(sizes))
    rows = {
        **times,
        'backward': both - times['forward'],
        'on top of the products': both - times['products'],
        'beside all parts': whole - both - times['optimizer'],
    }
    print(f'{"a step of attnlab":<24}{"ms":>10}{"share":>8}')
    for name, took in rows.items():
        print(f'{name:<24}{1e3 * took:10.1f}{took / whole:8.0%}' + f'{work / took:9.0f} GF/s' * (name == 'products'))


def parts(sizes: Sizes, model: LanguageModel, params: Any, arrays: tuple[np.ndarray, ...]) -> dict[str, Callable]:
    """The optimizer's update, the loss, the loss with its gradient, and the products alone."""
    loss, rng = _loss(model), jax.random.key(0)

    def mean(params: Any, arrays: Any) -> jax.Array:
        sums = loss(params, arrays, rng)
        return sums.total / sums.weight

    forward, both, multiply = jax.jit(mean), jax.jit(jax.value_and_grad(mean)), jax.jit(_multiply)
    shapes = ((left, right, (*left[:-1], right[-1])) for left, right in products(sizes))
    operands = [[jnp.ones(shape) for shape in each] for each in shapes]
    return {
        'optimizer': _updater(params),
        'forward': lambda: jax.block_until_ready(forward(params, arrays)),
        'forward and backward': lambda: jax.block_until_ready(both(params, arrays)),
        'products': lambda: jax.block_until_ready(multiply(operands)),
    }


def _updater(params: Any) -> Callable[[], Any]:
    """A function that clips and applies a gradient, as a training step does."""
    optimize = _optimizer()
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


def products(sizes: Sizes) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes of both sides of each matrix product of the forward pass, attention's over all pairs, masked or not."""
    V, D, L, N, T, B = sizes
    tokens, head = B * T, (B, N, T, D // N)
    attention = [*[((tokens, D), (D, D))] * 4, (head, (B, N, D // N, T)), ((B, N, T, T), head)]
    return [*attention, ((tokens, D), (D, 4 * D)), ((tokens, 4 * D), (4 * D, D))] * L + [((tokens, D), (D, V))]


def _multiply(operands: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
    """A number of each product's result and gradients: all of them are computed, none is kept."""
    found = []
    for left, right, slope in operands:
        result, pull = jax.vjp(jnp.matmul, left, right)
        found += [x[(0,) * x.ndim] for x in (result, *pull(slope))]
    return found
