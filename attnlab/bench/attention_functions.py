"""The attention functions that are compared, each as a user calls it on arrays [B, T, N, H]."""

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from attnlab.kernels.attention import dot_product_attention
from attnlab.kernels.call import AttentionCall
from attnlab.kernels.implementations import IMPLEMENTATIONS, implementations_by_speed
from attnlab.kernels.masks import Mask


class AttentionProblem(NamedTuple):
    """One call in float32: B, T, N, H, the same for keys and values; backward is forward too."""

    shape: tuple[int, int, int, int]
    causal: bool = False
    backward: bool = False

    def __str__(self) -> str:
        mask, work = 'causal' if self.causal else 'plain', 'forward and backward' if self.backward else 'forward'
        return f'{"x".join(map(str, self.shape))}, {mask}, {work}'


class PeakMatrices(NamedTuple):
    """Arrays [B, N, T, T] of float32 that are held at the peak, measured by `attnlab.bench.memory` at T = 4,096."""

    forward: float = 0.0
    plain: float = 0.0  # with backward
    causal: float = 0.0


PEAK_MATRICES = {
    'dense': PeakMatrices(2.1, 8.2, 10.2),
    'jax.nn': PeakMatrices(2.1, 7.1, 7.1),
    'flax': PeakMatrices(2.1, 7.1, 7.1),
}


def peer_names() -> list[str]:
    """What ours is compared with; PyTorch only where it is installed."""
    return ['jax.nn', 'flax', *(['PyTorch'] if find_spec('torch') else [])]


@functools.cache
def supported_implementations(problem: AttentionProblem) -> tuple[str, ...]:
    """Our implementations that serve the call, the one that `implementation=None` takes first."""
    array: Any = jax.ShapeDtypeStruct(problem.shape, jnp.float32)
    order = implementations_by_speed(
        AttentionCall(array, array, array, Mask(is_causal=problem.causal), 1.0), jax.default_backend()
    )
    names = []
    for name in dict.fromkeys([*order, *IMPLEMENTATIONS]):
        try:
            jax.eval_shape(_ours(name, problem.causal), array, array, array)
            names.append(name)
        except NotImplementedError:
            continue
    return tuple(names)


def estimate_peak_bytes(name: str, problem: AttentionProblem) -> int:
    """Bytes that the side is likely to take at its peak; 0 where that is little."""
    B, T, N, _ = problem.shape
    cost = PEAK_MATRICES.get(name, PeakMatrices())
    return int((cost[1 + problem.causal] if problem.backward else cost.forward) * B * N * T * T * 4)


def random_inputs(problem: AttentionProblem, seed: int) -> list[np.ndarray]:
    """query, key, value and the weights that the output is summed with, [B, T, N, H] float32."""
    random = np.random.default_rng(seed)
    return [random.standard_normal(problem.shape, np.float32) for _ in range(4)]


def prepare_function(name: str, problem: AttentionProblem, seed: int = 0) -> Callable[[], tuple]:
    """A function of nothing that computes (output,), or the gradients in query, key and value of its weighted sum.

    All that comes before the first step is done when it is returned: inputs on the device, the program compiled.
    """
    if name == 'PyTorch':
        return _torch(problem, random_inputs(problem, seed))
    arrays = [jnp.asarray(x) for x in random_inputs(problem, seed)]
    if name == 'flax' and problem.causal:
        arrays.append(nn.make_causal_mask(jnp.ones((1, problem.shape[1])), dtype=bool))
    attend = _attend(name, problem)

    def both(query, key, value, weights, *mask):
        # The sum is given back too: else a program may leave out the output, which a training step needs.
        return jax.value_and_grad(lambda *qkv: jnp.sum(attend(*qkv, *mask) * weights), (0, 1, 2))(query, key, value)

    def forward(query, key, value, weights, *mask):
        return None, (attend(query, key, value, *mask),)

    program = jax.jit(both if problem.backward else forward).lower(*arrays).compile()
    return lambda: jax.block_until_ready(program(*arrays))[1]


def _attend(name: str, problem: AttentionProblem) -> Callable[..., jax.Array]:
    if name == 'jax.nn':
        return lambda query, key, value: jax.nn.dot_product_attention(query, key, value, is_causal=problem.causal)
    if name == 'flax':
        return lambda query, key, value, mask=None: nn.dot_product_attention(query, key, value, mask=mask)
    return _ours(None if name == supported_implementations(problem)[0] else name, problem.causal)


def _ours(name: str | None, causal: bool) -> Callable[..., Any]:
    return lambda query, key, value: dot_product_attention(query, key, value, is_causal=causal, implementation=name)


def _torch(problem: AttentionProblem, arrays: list[np.ndarray]) -> Callable[[], tuple]:
    import torch  # pyright: ignore[reportMissingImports]

    query, key, value, weights = (torch.from_numpy(x) for x in arrays)
    qkv = [x.requires_grad_(problem.backward) for x in (query, key, value)]

    def attend() -> Any:
        q, k, v = (x.transpose(1, 2) for x in qkv)  # PyTorch has heads before positions
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=problem.causal).transpose(1, 2)

    if problem.backward:
        return lambda: torch.autograd.grad((attend() * weights).sum(), qkv)
    return lambda: (attend(),)
