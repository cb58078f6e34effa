"""The feed-forward layer of a block: two matrices, or three with a gate."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.linear import default_kernel_init
from jaxtyping import Array, Float

from attnlab.kernels.call import check_dropout_rate

AnyArray = Array | np.ndarray


_GELU, _GELU_TANH = (functools.partial(jax.nn.gelu, approximate=approximate) for approximate in (False, True))
PLAIN_ACTIVATIONS = {'relu': jax.nn.relu, 'gelu': _GELU, 'gelu_tanh': _GELU_TANH}
"""Activation of each kind of MLP without a gate."""

GATED_ACTIVATIONS = {'swiglu': jax.nn.silu, 'geglu': _GELU, 'reglu': jax.nn.relu}
"""Activation of the gate of each kind of MLP with one."""


def default_mlp_width(kind: str, D: int) -> int:
    """Return F for a model of width D: 4 D, or for a gated kind 8 D / 3 rounded up to a multiple of 8.

    Both have the same number of parameters (Shazeer 2020, section 3.1) except for rounding and biases: within 1 % at
    all widths from 137 on, and at every multiple of 16 from 128 on.

    Raises:
      ValueError: if the kind is unknown.
    """
    _check_kind(kind)
    return 8 * -(-D // 3) if kind in GATED_ACTIVATIONS else 4 * D


def resolve_use_bias(kind: str, use_bias: bool | None) -> bool:
    """Return `use_bias`; None means no biases for gated kinds (Shazeer 2020, equation 5) and biases for the others."""
    return kind not in GATED_ACTIVATIONS if use_bias is None else use_bias


def input_kernel_names(kind: str) -> tuple[str, ...]:
    """Return the names of the kernels that are applied to the input: 'up', and 'gate' for a gated kind."""
    _check_kind(kind)
    return ('up', 'gate') if kind in GATED_ACTIVATIONS else ('up',)


def hidden_activations(kind: str, project: Callable[[str], Array]) -> Array:
    """Return the hidden activations; `project` returns the product of the input with the kernel of a given name."""
    _check_kind(kind)
    if kind in PLAIN_ACTIVATIONS:
        return PLAIN_ACTIVATIONS[kind](project('up'))
    return GATED_ACTIVATIONS[kind](project('gate')) * project('up')


class MLP(nn.Module):
    """act(x W_up) W_down (Vaswani et al. 2017, section 3.3), or (act(x W_gate) * x W_up) W_down (Shazeer 2020).

    Parameters: `up` [D, F], `gate` [D, F] for gated kinds, `down` [F, D], each a `kernel` and, with biases, a `bias`.

    kind: 'relu'; 'gelu', with the exact normal distribution function, as in PyTorch and BERT; 'gelu_tanh', with the
      tanh approximation, as in GPT-2 and Flax; with a gate: 'swiglu' (SiLU), 'geglu' (exact GELU), 'reglu' (ReLU).
    features: F; None: `default_mlp_width`.
    use_bias: whether the layers have biases; None: only without a gate.
    dropout_rate: dropout rate of the hidden activations; dropout of the output is applied by the block.
    dtype: dtype of the computation; None: inputs and parameters are promoted.
    param_dtype: dtype of the parameters.
    kernel_init: initialiser of the kernels of `up` and `gate`.
    out_init: initialiser of the kernel of `down`.
    """

    kind: str
    features: int | None = None
    use_bias: bool | None = None
    dropout_rate: float = 0.0
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Array] = default_kernel_init
    out_init: Callable[..., Array] = default_kernel_init

    @nn.compact
    def __call__(self, x: Float[AnyArray, '*B D'], *, deterministic: bool = True) -> Float[Array, '*B D']:
        """Return the output [..., D].  Unless deterministic, dropout draws from the `dropout` stream of rngs.

        Raises:
          ValueError: if the kind is unknown, or the width or the rate is out of range.
        """
        check_mlp_fields(self.kind, self.features, self.dropout_rate)
        D = x.shape[-1]
        F = default_mlp_width(self.kind, D) if self.features is None else self.features

        def dense(name: str, features: int, init: Callable[..., Array]) -> nn.Dense:
            return nn.Dense(
                features, resolve_use_bias(self.kind, self.use_bias), dtype=self.dtype, param_dtype=self.param_dtype,
                kernel_init=init, name=name,
            )  # fmt: skip

        hidden = hidden_activations(self.kind, lambda name: dense(name, F, self.kernel_init)(x))
        hidden = nn.Dropout(self.dropout_rate, deterministic=deterministic)(hidden)
        return dense('down', D, self.out_init)(hidden)


def check_mlp_fields(kind: str, features: int | None, dropout_rate: float) -> None:
    """Raise ValueError if the kind is unknown, or the width or the rate is out of range, even if it is not used."""
    _check_kind(kind)
    if features is not None and features < 1:
        raise ValueError(f'features is {features}; expected a positive number')
    check_dropout_rate(dropout_rate)


def _check_kind(kind: str) -> None:
    if kind not in (kinds := PLAIN_ACTIVATIONS | GATED_ACTIVATIONS):
        raise ValueError(f'kind is {kind!r}; expected one of {", ".join(map(repr, kinds))}')
