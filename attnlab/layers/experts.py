"""A mixture of experts: many feed-forward layers, of which each token uses a few."""

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
    """sum_a weight_a MLP_(expert_a)(x) over the experts that a linear router selects (Shazeer et al. 2017, section 2).

    Parameters: `router` with a kernel [D, E]; `up`, `gate` and `down` as in `attnlab.layers.mlp.MLP` with E as an
    additional first axis: kernels [E, D, F], [E, D, F] and [E, F, D]; with a shared expert, the MLP `shared_expert`.

    experts: E, the number of experts.
    experts_per_token: A, the number of experts of each token.
    kind, features, use_bias, dropout_rate: as in `MLP`, for every expert, including the shared one.
    capacity_factor: factor of `attnlab.kernels.routing.expert_capacity`; None: no limit.  The capacity of an expert, in
      tokens of one batch row, depends on the number of real tokens in that row, not on padding or on other rows.  A
      choice beyond the capacity is dropped: it adds exactly zero, and the weights of the token's other choices do not
      grow.  Decoding with a cache, a few tokens at a time, drops other choices than a pass over all tokens.
    order, renormalised: the order in which choices take the capacity, and the definition of the weights, as in
      `attnlab.kernels.routing.route_tokens`.
    shared: adds one more expert for all tokens, with weight one (Dai et al. 2024, section 3.2).
    dtype: dtype of the experts' computation.  The router's parameters, logits, softmax and losses, and the weighted
      sum, are float32 or wider.
    param_dtype, kernel_init, out_init: as in `MLP`, for each expert; the router is initialised by `kernel_init`.

    Routing adds no noise: two evaluations give the same bits.
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
        self,
        x: Float[AnyArray, 'B T D'],
        token_mask: Bool[AnyArray, 'B T'] | None = None,
        *,
        deterministic: bool = True,
    ) -> tuple[Float[Array, 'B T D'], dict[str, Float[Array, '']]]:
        """Return the output [B, T, D], zero for padding, and losses and statistics over real tokens.

        Args:
          x: [B, T, D].
          token_mask: [B, T], True for real tokens; None: all are real.
          deterministic: no dropout; otherwise it draws from the `dropout` stream of rngs.

        Returns:
          The output, and the dict {'load_balance', 'z', 'dropped'}: the losses of `Routing`, without loss weights, and
          the fraction of the choices that was dropped.

        Raises:
          ValueError: for a size, name or rate that is not valid.
        """
        self._check_arguments(x, token_mask)
        x = jnp.asarray(x)
        token_mask = None if token_mask is None else jnp.asarray(token_mask)
        if token_mask is not None:
            x = jnp.where(token_mask[..., None], x, 0)  # NaN in padding would reach the gradients of parameters
        routing = route_tokens(
            self._router_logits(x), self.experts_per_token, token_mask,
            capacity=self._capacity(x.shape[1], token_mask), order=self.order, renormalised=self.renormalised,
        )  # fmt: skip
        output = self._routed_output(x, routing, deterministic)
        if self.shared:
            output = output + self._shared_output(x, token_mask, deterministic)
        tokens = x.shape[0] * x.shape[1] if token_mask is None else jnp.sum(token_mask)
        dropped = routing.dropped / jnp.maximum(self.experts_per_token * tokens, 1).astype(jnp.float32)
        return output, {'load_balance': routing.load_balance, 'z': routing.z, 'dropped': dropped}

    def _router_logits(self, x: Array) -> Array:
        """Return the router's logits [B, T, E], in float32 or wider."""
        logits_dtype, param_dtype = (jnp.promote_types(dtype, jnp.float32) for dtype in (x.dtype, self.param_dtype))
        router = nn.Dense(
            self.experts, use_bias=False, dtype=logits_dtype, param_dtype=param_dtype,
            precision=jax.lax.Precision.HIGHEST,  # by default, some devices multiply float32 in lower precision
            kernel_init=self.kernel_init, name='router',
        )  # fmt: skip
        return router(x)

    def _capacity(self, T: int, token_mask: Array | None) -> int | Array | None:
        """Return the tokens that an expert takes of a batch row: one number, or [B] with a mask; None: all."""
        if (factor := self.capacity_factor) is None:
            return None
        capacity_of = lambda tokens: expert_capacity(tokens, self.experts, self.experts_per_token, factor)
        if token_mask is None:
            return capacity_of(T)
        return jnp.asarray([capacity_of(tokens) for tokens in range(T + 1)])[jnp.sum(token_mask, axis=1)]

    def _routed_output(self, x: Array, routing: Routing, deterministic: bool) -> Array:
        """Return the weighted sum [B, T, D] of the outputs of each token's experts."""
        (B, T, D), A = x.shape, self.experts_per_token
        F = default_mlp_width(self.kind, D) if self.features is None else self.features

        def parameters(name: str, rows: int, columns: int, init: Callable[..., Array]) -> tuple[Array, Array | None]:
            use_bias = resolve_use_bias(self.kind, self.use_bias)
            return ExpertKernels((self.experts, rows, columns), use_bias, self.param_dtype, init, name=name)()

        kernels = {name: parameters(name, D, F, self.kernel_init) for name in input_kernel_names(self.kind)}
        kernels['down'] = parameters('down', F, D, self.out_init)
        leaves, tree = jax.tree.flatten(kernels)
        x, *leaves = promote_dtype(x, *leaves, dtype=self.dtype)
        keep = None
        if self.dropout_rate and not deterministic:
            # Drawn for each token and choice, not for each place in a block of rows: places differ between devices.
            keep = jax.random.bernoulli(self.make_rng('dropout'), 1.0 - self.dropout_rate, (B, T, A, F))
        return mixture_of_experts(
            x,
            routing,
            jax.tree.unflatten(tree, leaves),
            partial(hidden_activations, self.kind),
            dropout_mask=keep,
            dropout_rate=self.dropout_rate,
        )

    def _shared_output(self, x: Array, token_mask: Array | None, deterministic: bool) -> Array:
        """Return the output [B, T, D] of the shared expert, zero for padding."""
        mlp = MLP(
            self.kind, self.features, self.use_bias, self.dropout_rate, self.dtype, self.param_dtype, self.kernel_init,
            self.out_init, name='shared_expert',
        )  # fmt: skip
        output = mlp(x, deterministic=deterministic)
        return output if token_mask is None else jnp.where(token_mask[..., None], output, 0)

    def _check_arguments(self, x: AnyArray, token_mask: AnyArray | None) -> None:
        check_mlp_fields(self.kind, self.features, self.dropout_rate)
        if self.experts < 1:
            raise ValueError(f'experts is {self.experts}; expected a positive number')
        if x.ndim != 3:
            raise ValueError(f'x has shape {x.shape}; expected [B, T, D]')
        if token_mask is not None and (token_mask.shape != x.shape[:2] or token_mask.dtype != bool):
            shape_and_dtype = f'shape {token_mask.shape} and dtype {token_mask.dtype}'
            raise ValueError(f'token_mask has {shape_and_dtype}; expected [B, T] = {x.shape[:2]} booleans')


class ExpertKernels(nn.Module):
    """The parameters of E layers like `flax.linen.Dense`: kernels [E, rows, columns], and biases [E, columns] or None.

    The kernel of each layer is initialised independently, with a PRNG key of its own.
    """

    shape: tuple[int, int, int]
    use_bias: bool
    param_dtype: Any
    kernel_init: Callable[..., Array]

    @nn.compact
    def __call__(self) -> tuple[Float[Array, 'E D F'], Float[Array, 'E F'] | None]:
        """Return the kernels and the biases."""
        kernel = self.param('kernel', _init_per_expert(self.kernel_init), self.shape, self.param_dtype)
        if not self.use_bias:
            return kernel, None
        return kernel, self.param('bias', nn.initializers.zeros, self.shape[::2], self.param_dtype)


def _init_per_expert(init: Callable[..., Array]) -> Callable[..., Array]:
    """Return an initialiser of [E, rows, columns] that applies `init` to each expert's matrix with its own key."""

    def stacked_init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        init_one = lambda expert_key: init(expert_key, shape[1:], dtype)
        return jax.vmap(init_one)(jax.random.split(key, shape[0]))

    return stacked_init
