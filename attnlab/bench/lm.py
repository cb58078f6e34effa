"""A causal language model in attnlab and in PyTorch: training steps, cached decoding, and a profile of a step."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
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

PROMPT_LENGTH = 16
DECODING_BATCH_SIZES = (1, 8)


class LanguageModelSizes(NamedTuple):
    """V, D, L, N, T and B; the defaults are those of the model that nanoGPT's README trains on a CPU."""

    vocabulary: int = 65
    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 64
    batch: int = 12


LARGER = LanguageModelSizes(vocabulary=8192, width=384, layers=6, heads=6, context=256, batch=8)


def main() -> None:
    """Print tokens a second of each framework, ratios, and a profile of a step, for a small and a larger model."""
    measure_language_model((LanguageModelSizes(), LARGER), rounds=15, seconds=12.0)


def measure_language_model(models: Sequence[LanguageModelSizes], rounds: int, seconds: float) -> None:
    """Print a table for each model, with medians of interleaved rounds, and a profile by `steps.print_profile`.

    Training is forward, backward, gradient clipping and Adam on one batch.  Decoding fills the context after a prompt,
    greedily.  Both frameworks start from the same weights; their losses and tokens are compared before they are timed.
    PyTorch decodes in a Python loop; only its training is compiled.

    The machine must be idle: PyTorch's threads wait for each other in every matrix product, so a process that occupies
    a core slows PyTorch down many times more than attnlab.

    rounds: most rounds of a row.  seconds: time of a row after which no further round begins.
    """
    from attnlab.bench import lm_torch as peer

    print(steps.opening_lines(peer.torch))
    for sizes in models:
        model, params, arrays = create_language_model(sizes)
        print(steps.table_header(sizes._asdict(), 'tokens a second'))
        functions, missing = lm_training_steps(sizes, model, params, arrays)
        times = time_interleaved(functions, rounds, seconds=seconds, settle=0.3)
        print(steps.table_row('training', arrays[0].size, times), flush=True)
        for batch in DECODING_BATCH_SIZES:
            prompt = np.random.default_rng(1).integers(0, sizes.vocabulary, (batch, PROMPT_LENGTH)).astype(np.int32)
            functions = greedy_decoders(sizes, model, params, prompt)
            times = time_interleaved(functions, rounds, seconds=seconds, check=check_same_tokens)
            token_count = batch * (sizes.context - PROMPT_LENGTH)
            print(steps.table_row(f'decoding, batch {batch}', token_count, times), flush=True)
        for reason in missing:
            print(f'-: {reason}')
        steps.print_profile(steps.model_loss(model), params, arrays, lm_product_shapes(sizes), rounds, seconds)


def create_language_model(sizes: LanguageModelSizes) -> tuple[LanguageModel, Any, tuple[np.ndarray, np.ndarray]]:
    """Return a model, its parameters, and a batch of random tokens as inputs and labels, each [B, T] int32."""
    config = LanguageModelConfig(
        layers=sizes.layers, width=sizes.width, heads=sizes.heads, context=sizes.context, init=0.0, scaled_init=False
    )
    model = LanguageModel(sizes.vocabulary, config)
    tokens = np.random.default_rng(0).integers(0, sizes.vocabulary, (sizes.batch, sizes.context + 1)).astype(np.int32)
    params = jax.jit(model.init)(jax.random.key(0), tokens[:, :-1])['params']
    return model, params, (tokens[:, :-1], tokens[:, 1:])


def _torch_model(sizes: LanguageModelSizes, params: Any) -> Any:
    """Return the PyTorch model with the same parameters."""
    from attnlab.bench import lm_torch as peer

    model = peer.LanguageModel(sizes.vocabulary, sizes.width, sizes.layers, sizes.context, sizes.heads, 'gelu')
    peer.load_parameters(model, params)
    return model


# Training


def lm_training_steps(
    sizes: LanguageModelSizes, model: LanguageModel, params: Any, arrays: tuple[np.ndarray, ...]
) -> tuple[dict[str, Callable[[], float]], list[str]]:
    """Return the result of `steps.training_steps` for this model."""
    from attnlab.bench import lm_torch as peer

    make_torch_model = partial(_torch_model, sizes, params)
    loss, tensors = steps.model_loss(model), peer.to_tensors(arrays)
    return steps.training_steps(loss, params, arrays, make_torch_model, peer.loss, tensors)


# Decoding


def greedy_decoders(
    sizes: LanguageModelSizes, model: LanguageModel, params: Any, prompt: np.ndarray
) -> dict[str, Callable[[], np.ndarray]]:
    """Return for each framework a function that decodes the tokens [B, T - P] after a prompt [B, P]."""
    from attnlab.bench import lm_torch as peer

    torch_model, count = _torch_model(sizes, params), sizes.context - prompt.shape[1]
    return {
        'attnlab': greedy_decoder(model, params, prompt, count),
        'PyTorch eager': lambda: peer.generate_greedily(torch_model, prompt, count),
    }


def greedy_decoder(model: LanguageModel, params: Any, prompt: np.ndarray, count: int) -> Callable[[], np.ndarray]:
    """Return a function that decodes `count` tokens greedily after a prompt [B, P], as [B, count] int32.

    All steps are one compiled program.
    """

    @jax.jit
    def run(params: Any, prompt: jax.Array) -> jax.Array:
        state = cache.init_cache(model, params, len(prompt), prompt.shape[1] + count)
        state, _ = cache.extend_cache(model, params, state, prompt[:, :-1])
        step, rng = cache.make_decode_step(model, params), jax.random.key(0)  # unused at temperature 0
        return sample_tokens(step, state, prompt[:, -1], rng=rng, max_tokens=count, temperature=0.0).tokens

    return lambda: np.asarray(run(params, prompt))


def check_same_tokens(tokens: Mapping[str, np.ndarray]) -> None:
    """Raise RunError unless all frameworks decode the same tokens.  tokens: framework -> [B, T - P] int32."""
    first, *others = tokens
    for name in others:
        differences = np.argwhere(tokens[first] != tokens[name])
        if len(differences):
            row, position = differences[np.argmin(differences[:, 1])]
            message = f'{first} and {name} differ in row {row} from token {position} on'
            raise RunError(f'the same weights and prompt give different tokens: {message}')


def lm_product_shapes(sizes: LanguageModelSizes) -> steps.ProductShapes:
    """Return the shapes of both operands of each matrix product of the forward pass."""
    V, D, L, N, T, B = sizes
    return steps.block_product_shapes(B, T, D, N, 4 * D) * L + [((B * T, D), (D, V))]
