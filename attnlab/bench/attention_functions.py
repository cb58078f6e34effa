"""The attention functions of the benchmark, each called as its users call it, on arrays [B, T, N, H]."""

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
    """One call in float32.

    shape: B, T, N, H of queries, keys and values.  backward: also compute gradients.
    """

    shape: tuple[int, int, int, int]
    causal: bool = False
    backward: bool = False

    def __str__(self) -> str:
        mask = 'causal' if self.causal else 'plain'
        passes = 'forward and backward' if self.backward else 'forward'
        return f'{"x".join(map(str, self.shape))}, {mask}, {passes}'


class PeakMatrices(NamedTuple):
    """Peak memory in arrays [B, N, T, T] of float32, measured by `attnlab.bench.memory` at T = 4,096.

    forward: of the forward pass.  plain, causal: of forward and backward, without and with a causal mask.
    """

    forward: float = 0.0
    plain: float = 0.0
    causal: float = 0.0


PEAK_MATRICES = {
    'dense': PeakMatrices(2.1, 8.2, 10.2),
    'jax.nn': PeakMatrices(2.1, 7.1, 7.1),
    'flax': PeakMatrices(2.1, 7.1, 7.1),
}


def peer_names() -> list[str]:
    """Return the names of the other libraries' functions; PyTorch only if it is installed."""
    return ['jax.nn', 'flax', *(['PyTorch'] if find_spec('torch') else [])]


@functools.cache
def supported_implementations(problem: AttentionProblem) -> tuple[str, ...]:
    """Return the implementations of attnlab that support the call, first the one that `implementation=None` takes."""
    array: Any = jax.ShapeDtypeStruct(problem.shape, jnp.float32)
    call = AttentionCall(array, array, array, Mask(is_causal=problem.causal), 1.0)
    order = implementations_by_speed(call, jax.default_backend())
    names = []
    for name in dict.fromkeys([*order, *IMPLEMENTATIONS]):
        try:
            jax.eval_shape(_attnlab_function(name, problem.causal), array, array, array)
            names.append(name)
        except NotImplementedError:
            continue
    return tuple(names)


def estimate_peak_bytes(name: str, problem: AttentionProblem) -> int:
    """Return the bytes that a function is likely to need at its peak; 0 if its memory is not O(T * T)."""
    B, T, N, _ = problem.shape
    matrices = PEAK_MATRICES.get(name, PeakMatrices())
    count = matrices.forward
    if problem.backward:
        count = matrices.causal if problem.causal else matrices.plain
    return int(count * B * N * T * T * 4)


def random_inputs(problem: AttentionProblem, seed: int) -> list[np.ndarray]:
    """Return query, key, value, and the weights of the summed output, each [B, T, N, H] float32."""
    random = np.random.default_rng(seed)
    return [random.standard_normal(problem.shape, np.float32) for _ in range(4)]


def prepare_function(name: str, problem: AttentionProblem, seed: int = 0) -> Callable[[], tuple]:
    """Return a function without arguments that runs the problem, with inputs on the device and the program compiled.

    The function returns (output,) or, under `problem.backward`, the gradients of the weighted sum of the output with
    respect to query, key and value; each [B, T, N, H] float32.
    """
    if name == 'PyTorch':
        return _torch_function(problem, random_inputs(problem, seed))
    arrays = [jnp.asarray(x) for x in random_inputs(problem, seed)]
    if name == 'flax' and problem.causal:
        arrays.append(nn.make_causal_mask(jnp.ones((1, problem.shape[1])), dtype=bool))
    attend = _jax_function(name, problem)

    def forward_and_backward(query, key, value, weights, *mask):
        # Without the sum in the result, the compiler could drop the output, which a training step needs.
        return jax.value_and_grad(lambda *qkv: jnp.sum(attend(*qkv, *mask) * weights), (0, 1, 2))(query, key, value)

    def forward(query, key, value, weights, *mask):
        return None, (attend(query, key, value, *mask),)

    program = jax.jit(forward_and_backward if problem.backward else forward).lower(*arrays).compile()
    return lambda: jax.block_until_ready(program(*arrays))[1]


def _jax_function(name: str, problem: AttentionProblem) -> Callable[..., jax.Array]:
    if name == 'jax.nn':
        return lambda query, key, value: jax.nn.dot_product_attention(query, key, value, is_causal=problem.causal)
    if name == 'flax':
        return lambda query, key, value, mask=None: nn.dot_product_attention(query, key, value, mask=mask)
    return _attnlab_function(None if name == supported_implementations(problem)[0] else name, problem.causal)


def _attnlab_function(name: str | None, causal: bool) -> Callable[..., Any]:
    return lambda query, key, value: dot_product_attention(query, key, value, is_causal=causal, implementation=name)


def _torch_function(problem: AttentionProblem, arrays: list[np.ndarray]) -> Callable[[], tuple]:
    import torch  # pyright: ignore[reportMissingImports]

    query, key, value, weights = (torch.from_numpy(x) for x in arrays)
    qkv = [x.requires_grad_(problem.backward) for x in (query, key, value)]

    def attend() -> Any:
        q, k, v = (x.transpose(1, 2) for x in qkv)  # PyTorch has the head axis before the position axis
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=problem.causal).transpose(1, 2)

    if problem.backward:
        return lambda: torch.autograd.grad((attend() * weights).sum(), qkv)
    return lambda: (attend(),)
