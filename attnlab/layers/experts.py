"""A mixture of experts: many feed-forward layers, of which every token goes through a few."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype
from flax.linen.linear import default_kernel_init
from jaxtyping import Array, Bool, Float

from attnlab.kernels.mixture import mixture_of_experts
from attnlab.kernels.routing import Routing, RoutingOrder, expert_capacity, route_tokens
from attnlab.layers.mlp import (
    MLP,
    check_mlp_fields,
    default_mlp_width,
    hidden_activations,
    input_kernel_names,
    resolve_use_bias,
)

AnyArray = Array | np.ndarray


class MixtureOfExperts(nn.Module):
    """sum_a weight_a MLP_(expert_a)(x), over the experts that a linear router picks (Shazeer et al. 2017, section 2).

    Parameters: `router` kernel [D, E]; those of `attnlab.layers.mlp.MLP` with an axis in front, `up` and `gate` kernels
    [E, D, F], `down` [E, F, D]; with a shared expert an MLP `shared_expert`.

    experts: E.  experts_per_token: A, how many experts a token goes to.
    kind, features, use_bias, dropout_rate: of every expert, the shared one included, as in `MLP`.
    capacity_factor: if None, every token is served.  Otherwise an expert takes `capacity` tokens of a batch row, by the
      number of real tokens in it: neither padding nor other rows matter.  A choice beyond that is dropped: it adds
      exactly zero, and the other choices of its token do not grow.  Decoding with a cache, a few tokens at a time,
      drops other choices than a pass over all tokens.
    order, renormalised: who comes first, and what weights are, as in `route`.
    shared: one more expert that all tokens go through, added with weight one (Dai et al. 2024, section 3.2).
    dtype: of the experts.  The router's parameters, logits, softmax and losses, and the sum, are float32 or wider.
    param_dtype, kernel_init, out_init: as in `MLP`, of each expert; the router starts from `kernel_init`.

    It draws no noise, and two evaluations give the same bits.
    """

    experts: int
    experts_per_token: int
    kind: str
    features: int | None = None
    use_bias: bool | None = None
    capacity_factor: float | None = None
    order: RoutingOrder = 'choice'
    renormalised: bool = True
    shared: bool = False
    dropout_rate: float = 0.0
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Array] = default_kernel_init
    out_init: Callable[..., Array] = default_kernel_init

    @nn.compact
    def __call__(
        self, x: Float[AnyArray, 'B T D'], mask: Bool[AnyArray, 'B T'] | None = None, *, deterministic: bool = True
    ) -> tuple[Float[Array, 'B T D'], dict[str, Float[Array, '']]]:
        """The output [B, T, D], zero for padding, and losses and statistics over real tokens only.

        Args:
          x: [B, T, D].
          mask: [B, T], true for real tokens; all are if None.
          deterministic: no dropout; otherwise it draws from the `dropout` stream of rngs.

        Returns:
          The output and {'load_balance', 'z', 'dropped'}: the losses of `Routing`, not weighted, and the part of the
          choices that was dropped.

        Raises:
          ValueError: for sizes, names and rates that do not fit, naming what came and what was expected.
        """
        self._check(x, mask)
        x = jnp.asarray(x)
        token_mask = None if mask is None else jnp.asarray(mask)
        if token_mask is not None:
            x = jnp.where(token_mask[..., None], x, 0)  # NaN there would come back in the gradients of parameters
        routing = route_tokens(
            self._logits(x), self.experts_per_token, token_mask, capacity=self._capacity(x.shape[1], token_mask),
            order=self.order, renormalised=self.renormalised,
        )  # fmt: skip
        output = self._served(x, routing, deterministic)
        if self.shared:
            output = output + self._shared(x, token_mask, deterministic)
        choices = self.experts_per_token * (x.shape[0] * x.shape[1] if token_mask is None else jnp.sum(token_mask))
        dropped = routing.dropped / jnp.maximum(choices, 1).astype(jnp.float32)
        return output, {'load_balance': routing.load_balance, 'z': routing.z, 'dropped': dropped}

    def _logits(self, x: Array) -> Array:
        # Products of float32 are rounded to less on some devices unless asked.
        wide, widest = (jnp.promote_types(dtype, jnp.float32) for dtype in (x.dtype, self.param_dtype))
        router = nn.Dense(
            self.experts, use_bias=False, dtype=wide, param_dtype=widest, precision=jax.lax.Precision.HIGHEST,
            kernel_init=self.kernel_init, name='router',
        )  # fmt: skip
        return router(x)

    def _capacity(self, T: int, token_mask: Array | None) -> int | Array | None:
        if (factor := self.capacity_factor) is None:
            return None
        at = lambda tokens: expert_capacity(tokens, self.experts, self.experts_per_token, factor)
        if token_mask is None:
            return at(T)
        return jnp.asarray([at(tokens) for tokens in range(T + 1)])[jnp.sum(token_mask, axis=1)]

    def _served(self, x: Array, routing: Routing, deterministic: bool) -> Array:
        """[B, T, D], the weighted sum of the outputs of the experts that were chosen."""
        (B, T, D), A = x.shape, self.experts_per_token
        F = default_mlp_width(self.kind, D) if self.features is None else self.features

        def matrix(name: str, rows: int, columns: int, init: Callable[..., Array]) -> tuple[Array, Array | None]:
            bias = resolve_use_bias(self.kind, self.use_bias)
            return ExpertKernels((self.experts, rows, columns), bias, self.param_dtype, init, name=name)()

        matrices = {name: matrix(name, D, F, self.kernel_init) for name in input_kernel_names(self.kind)}
        matrices['down'] = matrix('down', F, D, self.out_init)
        leaves, tree = jax.tree.flatten(matrices)
        x, *leaves = promote_dtype(x, *leaves, dtype=self.dtype)
        keep = None
        if self.dropout_rate and not deterministic:
            # Drawn by token and choice, not by place, which is another on other devices.
            keep = jax.random.bernoulli(self.make_rng('dropout'), 1.0 - self.dropout_rate, (B, T, A, F))
        return mixture_of_experts(
            x,
            routing,
            jax.tree.unflatten(tree, leaves),
            partial(hidden_activations, self.kind),
            dropout_mask=keep,
            dropout_rate=self.dropout_rate,
        )

    def _shared(self, x: Array, token_mask: Array | None, deterministic: bool) -> Array:
        mlp = MLP(
            self.kind, self.features, self.use_bias, self.dropout_rate, self.dtype, self.param_dtype, self.kernel_init,
            self.out_init, name='shared_expert',
        )  # fmt: skip
        output = mlp(x, deterministic=deterministic)
        return output if token_mask is None else jnp.where(token_mask[..., None], output, 0)

    def _check(self, x: AnyArray, mask: AnyArray | None) -> None:
        check_mlp_fields(self.kind, self.features, self.dropout_rate)
        if self.experts < 1:
            raise ValueError(f'experts is {self.experts}; expected a positive number')
        if x.ndim != 3:
            raise ValueError(f'x has shape {x.shape}; expected [B, T, D]')
        if mask is not None and (mask.shape != x.shape[:2] or mask.dtype != bool):
            came = f'shape {mask.shape} and dtype {mask.dtype}'
            raise ValueError(f'mask has {came}; expected [B, T] = {x.shape[:2]} booleans')


class ExpertKernels(nn.Module):
    """The kernel [E, rows, columns] of as many `flax.linen.Dense`, each initialised on its own, and their biases
    [E, columns], or None."""

    shape: tuple[int, int, int]
    use_bias: bool
    param_dtype: Any
    kernel_init: Callable[..., Array]

    @nn.compact
    def __call__(self) -> tuple[Float[Array, 'E D F'], Float[Array, 'E F'] | None]:
        kernel = self.param('kernel', _each(self.kernel_init), self.shape, self.param_dtype)
        if not self.use_bias:
            return kernel, None
        return kernel, self.param('bias', nn.initializers.zeros, self.shape[::2], self.param_dtype)


def _each(init: Callable[..., Array]) -> Callable[..., Array]:
    """The initialiser of one matrix, on as many keys as there are experts."""

    def stacked(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        return jax.vmap(lambda one: init(one, shape[1:], dtype))(jax.random.split(key, shape[0]))

    return stacked
