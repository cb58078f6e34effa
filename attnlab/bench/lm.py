"""A causal language model beside the same one in PyTorch: training steps, cached decoding, and where the time goes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from attnlab.bench import steps
from attnlab.bench.timing import time_interleaved
from attnlab.configs import LanguageModelConfig
from attnlab.decode import cache
from attnlab.decode.sampling import sample_tokens
from attnlab.errors import RunError
from attnlab.models.language import LanguageModel

PROMPT, BATCHES = 16, (1, 8)  # of decoding


class LanguageModelSizes(NamedTuple):
    """V, D, L, N, T and B; by default those that nanoGPT's README trains on a CPU."""

    vocabulary: int = 65
    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 64
    batch: int = 12


LARGER = LanguageModelSizes(vocabulary=8192, width=384, layers=6, heads=6, context=256, batch=8)


def main() -> None:
    """Prints tokens a second of each side, ratios, and shares of our training step, for a small and a larger model."""
    measure_language_model((LanguageModelSizes(), LARGER), rounds=15, seconds=12.0)


def measure_language_model(models: Sequence[LanguageModelSizes], rounds: int, seconds: float) -> None:
    """One table a model: medians of interleaved rounds, none begun after `seconds` a row; then `steps.print_profile`.

    Training is forward, backward, clipping and Adam on one batch; decoding fills the context behind a prompt, greedily.
    Both start from the same weights, and must agree on the loss and on the tokens there before they are timed.
    PyTorch decodes by a loop in Python; only its training is compiled.
    The machine has to be quiet: PyTorch's threads wait for each other in every product, and where another process
    holds a core it loses many times what ours loses.
    """
    from attnlab.bench import lm_torch as peer

    print(steps.opening_lines(peer.torch))
    for sizes in models:
        model, params, arrays = create_language_model(sizes)
        print(steps.table_header(sizes._asdict(), 'tokens a second'))
        functions, missing = lm_training_steps(sizes, model, params, arrays)
        times = time_interleaved(functions, rounds, seconds=seconds, settle=0.3)
        print(steps.table_row('training', arrays[0].size, times), flush=True)
        for batch in BATCHES:
            prompt = np.random.default_rng(1).integers(0, sizes.vocabulary, (batch, PROMPT)).astype(np.int32)
            functions = greedy_decoders(sizes, model, params, prompt)
            times = time_interleaved(functions, rounds, seconds=seconds, check=check_same_tokens)
            print(steps.table_row(f'decoding, batch {batch}', batch * (sizes.context - PROMPT), times), flush=True)
        for reason in missing:
            print(f'-: {reason}')
        steps.print_profile(steps.model_loss(model), params, arrays, lm_product_shapes(sizes), rounds, seconds)


def create_language_model(sizes: LanguageModelSizes) -> tuple[LanguageModel, Any, tuple[np.ndarray, np.ndarray]]:
    """A model, its parameters, and a batch of random tokens as inputs and labels [B, T] int32."""
    config = LanguageModelConfig(
        layers=sizes.layers, width=sizes.width, heads=sizes.heads, context=sizes.context, init=0.0, scaled_init=False
    )
    model = LanguageModel(sizes.vocabulary, config)
    tokens = np.random.default_rng(0).integers(0, sizes.vocabulary, (sizes.batch, sizes.context + 1)).astype(np.int32)
    params = jax.jit(model.init)(jax.random.key(0), tokens[:, :-1])['params']
    return model, params, (tokens[:, :-1], tokens[:, 1:])


def _peer(sizes: LanguageModelSizes, params: Any) -> Any:
    """PyTorch's model with our parameters."""
    from attnlab.bench import lm_torch as peer

    other = peer.LanguageModel(sizes.vocabulary, sizes.width, sizes.layers, sizes.context, sizes.heads, 'gelu')
    peer.load_parameters(other, params)
    return other


# Training


def lm_training_steps(
    sizes: LanguageModelSizes, model: LanguageModel, params: Any, arrays: tuple[np.ndarray, ...]
) -> tuple[dict[str, Callable[[], float]], list[str]]:
    """As `steps.training_steps`."""
    from attnlab.bench import lm_torch as peer

    other = lambda: _peer(sizes, params)
    return steps.training_steps(steps.model_loss(model), params, arrays, other, peer.loss, peer.to_tensors(arrays))


# Decoding


def greedy_decoders(
    sizes: LanguageModelSizes, model: LanguageModel, params: Any, prompt: np.ndarray
) -> dict[str, Callable[[], np.ndarray]]:
    """What fills the context behind a prompt [B, P], by side; each returns the tokens [B, T - P]."""
    from attnlab.bench import lm_torch as peer

    other, count = _peer(sizes, params), sizes.context - prompt.shape[1]
    return {
        'attnlab': greedy_decoder(model, params, prompt, count),
        'PyTorch eager': lambda: peer.generate_greedily(other, prompt, count),
    }


def greedy_decoder(model: LanguageModel, params: Any, prompt: np.ndarray, count: int) -> Callable[[], np.ndarray]:
    """A function that returns the `count` most probable tokens after a prompt [B, P], by one compiled program."""

    @jax.jit
    def run(params: Any, prompt: jax.Array) -> jax.Array:
        kept = cache.init_cache(model, params, len(prompt), prompt.shape[1] + count)
        kept, _ = cache.extend_cache(model, params, kept, prompt[:, :-1])
        step, rng = cache.make_decode_step(model, params), jax.random.key(0)  # temperature 0 draws nothing
        return sample_tokens(step, kept, prompt[:, -1], rng=rng, max_tokens=count, temperature=0.0).tokens

    return lambda: np.asarray(run(params, prompt))


def check_same_tokens(found: Mapping[str, np.ndarray]) -> None:
    """Raises RunError unless all sides say the same."""
    first, *others = found
    for name in others:
        apart = np.argwhere(found[first] != found[name])
        if len(apart):
            row, at = apart[np.argmin(apart[:, 1])]
            raise RunError(f'the same weights and prompt: {first} and {name} part in row {row} at token {at}')


def lm_product_shapes(sizes: LanguageModelSizes) -> steps.ProductShapes:
    """Shapes of both sides of each matrix product of the forward pass."""
    V, D, L, N, T, B = sizes
    return steps.block_product_shapes(B, T, D, N, 4 * D) * L + [((B * T, D), (D, V))]
