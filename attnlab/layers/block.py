"""The Transformer block and a stack of them, from the original to today's: each variant is a field of `BlockConfig`."""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from attnlab.configs.block import BlockConfig
from attnlab.kernels import mesh_axes
from attnlab.kernels.masks import Mask, window_mask
from attnlab.kernels.mesh_axes import shard_rows
from attnlab.layers.experts import MixtureOfExperts
from attnlab.layers.mixers import CausalConvolution, RecurrentMixer
from attnlab.layers.mlp import MLP
from attnlab.layers.multihead import MultiHeadAttention
from attnlab.layers.positions import NoEncoding, PositionEncoding


def compute_dtype(config: BlockConfig) -> Any:
    """The dtype of the computation; None for float32, where Flax takes that of inputs and parameters."""
    return None if config.dtype == 'float32' else jnp.dtype(config.dtype)


class TransformerBlock(nn.Module):
    """One block: attention, then an MLP or experts, each added to what came in (Vaswani et al. 2017, section 3.1).

    encoding: positions in the self-attention.
    cross: attention to a memory comes between the two.
    cache_length: tokens that the key-value cache holds, 0: no cache; other mixers keep the state that they need.
    """

    config: BlockConfig
    encoding: PositionEncoding
    cross: bool = False
    cache_length: int = 0

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'B T D'],
        mask: Mask,
        token_mask: Bool[Array, 'B T'] | None,
        deterministic: bool,
        memory: Float[Array, 'B S D'] | None = None,
        memory_mask: Mask | None = None,
        drop_rate: Float[Array, ''] | float = 0.0,
    ) -> tuple[Float[Array, 'B T D'], dict[str, Array]]:
        """x after the block, and `aux`: auxiliary losses and statistics of its experts, {} without experts.

        token_mask: true for real tokens, which experts count and caches keep; None: all.
        memory, memory_mask: the states that a cross block attends to, and its mask.
        drop_rate: rate of skipping this block, read if the config has a `layer_drop`.
        """
        config, aux, block_input = self.config, {}, x
        drop = nn.Dropout(config.dropout, deterministic=deterministic)
        mix, feed = self._mixer(), self._feed()

        def feed_forward(x: Array) -> Array:
            if not config.experts:
                return feed(x, deterministic=deterministic)
            output, stats = feed(x, token_mask, deterministic=deterministic)
            aux.update(stats)
            return output

        def add(x: Array, branch: Callable[[Array], Array], name: str) -> Array:
            norm = lambda x, name: _norm(config, name)(x)
            match config.order:
                case 'pre':
                    return x + drop(branch(norm(x, f'{name}_norm')))
                case 'post':
                    return norm(x + drop(branch(x)), f'{name}_norm')
                case 'sandwich':
                    return x + drop(norm(branch(norm(x, f'{name}_norm')), f'{name}_out_norm'))

        if config.parallel:
            if config.order != 'pre' or self.cross:
                raise ValueError(f"parallel blocks have order 'pre' and no cross-attention, not {config.order!r}")
            normed = _norm(config, 'attention_norm')(x)
            x = x + drop(mix(normed, mask, token_mask, deterministic)) + drop(feed_forward(normed))
        else:
            x = add(x, lambda x: mix(x, mask, token_mask, deterministic), 'attention')
            if self.cross:
                name = 'cross_attention'
                attend = self._attention(name)
                x = add(x, lambda x: attend(x, memory, mask=memory_mask, deterministic=deterministic), name)
            x = add(x, feed_forward, 'mlp')
        if config.layer_drop and not deterministic:
            stays = jax.random.bernoulli(self.make_rng('dropout'), 1.0 - drop_rate, (x.shape[0], 1, 1))
            x = block_input + jnp.where(stays, (x - block_input) / (1.0 - drop_rate), 0.0).astype(x.dtype)
        return shard_rows(x), aux

    def _mixer(self) -> Callable[[Array, Mask, Array | None, bool], Array]:
        """The layer that mixes tokens, as a function of (x, mask, token_mask, deterministic)."""
        config = self.config
        match config.mixer:
            case 'attention':
                return self._attend
            case 'convolution':
                layer = CausalConvolution(
                    config.kernel_size, config.use_bias, self._starts()['out_init'], compute_dtype(config),
                    self.cache_length > 0, name='convolution',
                )  # fmt: skip
            case 'gru' | 'lstm' as kind:
                layer = RecurrentMixer(kind, self.cache_length > 0, name='recurrence')
        return lambda x, mask, token_mask, deterministic: layer(x, mask.query_segment_ids, token_mask)

    def _attend(self, x: Array, mask: Mask, token_mask: Array | None, deterministic: bool) -> Array:
        config = self.config
        if config.window:
            mask = mask & window_mask(config.window, 0)
        T = x.shape[1]
        lengths, positions = (T, self.cache_length or T), (mask.query_positions, mask.key_positions)
        bias = self.encoding.bias(config.heads, lengths, positions, not mask.is_causal)
        return self._attention('attention')(x, mask=mask, bias=bias, deterministic=deterministic)

    def _attention(self, name: str) -> Any:
        """An attention layer. Its type is `Any`, as a call returns a tuple only where weights are asked for."""
        config = self.config
        return MultiHeadAttention(
            config.heads, config.kv_heads or None, config.head_width or None, use_bias=config.use_bias,
            qk_norm=None if config.qk_norm == 'none' else config.qk_norm,
            encoding=self.encoding if name == 'attention' else NoEncoding(), sinks=config.sinks,
            dropout_rate=config.attention_dropout, dtype=compute_dtype(config),
            implementation=None if config.implementation == 'auto' else config.implementation,
            cache_length=self.cache_length, name=name, **self._starts(),
        )  # fmt: skip

    def _feed(self) -> Any:
        config = self.config
        common: dict[str, Any] = dict(
            kind=config.mlp, features=config.mlp_width or None, use_bias=config.use_bias, dtype=compute_dtype(config),
            **self._starts(),
        )
        if not config.experts:
            return MLP(name='mlp', **common)
        return MixtureOfExperts(
            experts=config.experts, experts_per_token=config.experts_per_token,
            capacity_factor=config.capacity_factor or None,
            shared=config.shared_expert,
            order='token',  # in the order of choices, a later token could take an earlier one's second slot
            # A single renormalised weight would always be 1, without a gradient for the router.
            renormalised=config.experts_per_token > 1,
            name='experts', **common,
        )  # fmt: skip

    def _starts(self) -> dict[str, Any]:
        """Initialisers of the kernels that lead into a branch and out of it."""
        std = self.config.init
        into = nn.initializers.lecun_normal() if std == 0 else nn.initializers.normal(std)
        if not self.config.scaled_init:
            return {'kernel_init': into, 'out_init': into}
        scale = 1.0 / math.sqrt(2 * self.config.layers)
        return {'kernel_init': into, 'out_init': lambda *args: into(*args) * scale}


def _norm(config: BlockConfig, name: str) -> nn.Module:
    if config.norm == 'rms':
        return nn.RMSNorm(epsilon=1e-6, dtype=compute_dtype(config), name=name)
    return nn.LayerNorm(epsilon=1e-5, use_bias=config.use_bias, dtype=compute_dtype(config), name=name)


class TransformerStack(nn.Module):
    """The blocks of a model, and a norm after the last one unless the order is 'post'.

    With `scan` they are one compiled loop over stacked parameters [L, ...], and the program does not grow with L; the
    cache is stacked behind the batch, [B, L, ...].  `remat` is what the backward pass computes again: 'none', 'full'
    (all of a block) or 'dots' (all but the results of matrix products).
    encoding, cross, cache_length: as in `TransformerBlock`.
    """

    config: BlockConfig
    encoding: PositionEncoding
    cross: bool = False
    cache_length: int = 0

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'B T D'],
        mask: Mask,
        token_mask: Bool[Array, 'B T'] | None = None,
        deterministic: bool = True,
        memory: Float[Array, 'B S D'] | None = None,
        memory_mask: Mask | None = None,
    ) -> tuple[Float[Array, 'B T D'], dict[str, Array]]:
        """x after all blocks, and `aux` of each, [L]."""
        block, x = self._remat(TransformerBlock), shard_rows(x)
        common = mask, token_mask, deterministic, memory, memory_mask
        fields: Any = dict(
            config=self.config, encoding=self.encoding, cross=self.cross, cache_length=self.cache_length
        )
        rates = np.linspace(0, self.config.layer_drop, self.config.layers + 1, dtype=np.float32)[1:]
        if self.config.scan:
            blocks = nn.scan(
                block, variable_axes={'params': 0, 'cache': 1, 'intermediates': 0},
                split_rngs={'params': True, 'dropout': True},
                in_axes=(*[nn.broadcast] * len(common), 0), length=self.config.layers,  # pyright: ignore[reportArgumentType]
                check_constancy_invariants=self.is_initializing(),  # as in `attnlab.layers.recurrent`
            )  # fmt: skip
            # The type that x has after a block inside of jax.shard_map.
            x = mesh_axes.match_varying_axes(x, mask, token_mask, memory, memory_mask, self.variables)
            x, aux = blocks(**fields, name='blocks')(x, *common, jnp.asarray(rates))
        else:
            by_layer = []
            for layer in range(self.config.layers):
                x, aux = block(**fields, name=f'block_{layer}')(x, *common, float(rates[layer]))
                by_layer.append(aux)
            aux = jax.tree.map(lambda *x: jnp.stack(x), *by_layer)
        return (x if self.config.order == 'post' else _norm(self.config, 'norm')(x)), aux

    def _remat(self, block: Any) -> Any:
        # Argument 0 is the module, argument 4 `deterministic`, which must stay a Python bool.  In a scan, XLA cannot
        # merge the recomputation with the forward pass, so that the costly prevent_cse is not needed.
        wrap = lambda **policy: nn.remat(block, prevent_cse=not self.config.scan, static_argnums=(4,), **policy)
        match self.config.remat:
            case 'none':
                return block
            case 'full':
                return wrap()
            case 'dots':
                return wrap(policy=jax.checkpoint_policies.checkpoint_dots)
