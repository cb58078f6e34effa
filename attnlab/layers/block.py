"""The Transformer block and a stack of blocks, from the original to current ones; variants are `BlockConfig` fields."""

import math
from collections.abc import Callable
from functools import partial
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
    """Return the dtype of the computation, or None for float32: Flax then promotes inputs and parameters."""
    return None if config.dtype == 'float32' else jnp.dtype(config.dtype)


class TransformerBlock(nn.Module):
    """One block: attention, then an MLP or experts, each with a residual connection (Vaswani et al. 2017, section 3.1).

    config: its fields select the variant, such as another token mixer in place of attention.
    encoding: the position encoding of self-attention.
    cross: whether the block has attention to a memory, between self-attention and the MLP.
    cache_length: number of tokens in the key-value cache, 0 for no cache.  Other mixers cache only their state.
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
        """Return the output of the block, and the auxiliary losses and statistics of its experts ({} without experts).

        Args:
          x: [B, T, D], the input.
          mask: the mask of self-attention.
          token_mask: [B, T], True for real tokens; experts and caches ignore the others.  None: all are real.
          deterministic: no dropout; otherwise it draws from the `dropout` stream of rngs.
          memory, memory_mask: the states [B, S, D] that cross-attention reads, and its mask.
          drop_rate: the probability of skipping this block, used if the config has a `layer_drop`.

        Raises:
          ValueError: if a parallel block has an order other than 'pre', or cross-attention.
        """
        config, aux, block_input = self.config, {}, x
        dropout = nn.Dropout(config.dropout, deterministic=deterministic)
        mix_tokens, feed_forward_layer = self._mixer(), self._feed_forward_layer()

        def feed_forward(x: Array) -> Array:
            if not config.experts:
                return feed_forward_layer(x, deterministic=deterministic)
            output, expert_aux = feed_forward_layer(x, token_mask, deterministic=deterministic)
            aux.update(expert_aux)
            return output

        def add_branch(x: Array, branch: Callable[[Array], Array], name: str) -> Array:
            norm = lambda x, name: _norm(config, name)(x)
            match config.order:
                case 'pre':
                    return x + dropout(branch(norm(x, f'{name}_norm')))
                case 'post':
                    return norm(x + dropout(branch(x)), f'{name}_norm')
                case 'sandwich':
                    return x + dropout(norm(branch(norm(x, f'{name}_norm')), f'{name}_out_norm'))

        if config.parallel:
            if config.order != 'pre' or self.cross:
                raise ValueError(
                    "parallel blocks need order 'pre' and no cross-attention; "
                    f'order is {config.order!r}, cross-attention is {self.cross}'
                )
            normed = _norm(config, 'attention_norm')(x)
            x = x + dropout(mix_tokens(normed, mask, token_mask, deterministic)) + dropout(feed_forward(normed))
        else:
            x = add_branch(x, lambda x: mix_tokens(x, mask, token_mask, deterministic), 'attention')
            if self.cross:
                attend = self._attention('cross_attention')
                attend_to_memory = lambda x: attend(x, memory, mask=memory_mask, deterministic=deterministic)
                x = add_branch(x, attend_to_memory, 'cross_attention')
            x = add_branch(x, feed_forward, 'mlp')
        if config.layer_drop and not deterministic:
            kept = jax.random.bernoulli(self.make_rng('dropout'), 1.0 - drop_rate, (x.shape[0], 1, 1))
            x = block_input + jnp.where(kept, (x - block_input) / (1.0 - drop_rate), 0.0).astype(x.dtype)
        return shard_rows(x), aux

    def _mixer(self) -> Callable[[Array, Mask, Array | None, bool], Array]:
        """Return the layer that mixes tokens, as a function of (x, mask, token_mask, deterministic)."""
        config = self.config
        match config.mixer:
            case 'attention':
                return self._self_attention
            case 'convolution':
                layer = CausalConvolution(
                    config.kernel_size, config.use_bias, self._kernel_inits()['out_init'], compute_dtype(config),
                    self.cache_length > 0, name='convolution',
                )  # fmt: skip
            case 'gru' | 'lstm' as kind:
                layer = RecurrentMixer(kind, self.cache_length > 0, name='recurrence')
        return lambda x, mask, token_mask, deterministic: layer(x, mask.query_segment_ids, token_mask)

    def _self_attention(self, x: Array, mask: Mask, token_mask: Array | None, deterministic: bool) -> Array:
        config = self.config
        if config.window:
            mask = mask & window_mask(config.window, 0)
        T = x.shape[1]
        lengths, positions = (T, self.cache_length or T), (mask.query_positions, mask.key_positions)
        bias = self.encoding.bias(config.heads, lengths, positions, not mask.is_causal)
        return self._attention('attention')(x, mask=mask, bias=bias, deterministic=deterministic)

    def _attention(self, name: str) -> Any:
        """Return an attention layer.  The type is `Any`, as a call returns a tuple if weights are requested."""
        config = self.config
        return MultiHeadAttention(
            config.heads, config.kv_heads or None, config.head_width or None, use_bias=config.use_bias,
            qk_norm=None if config.qk_norm == 'none' else config.qk_norm,
            encoding=self.encoding if name == 'attention' else NoEncoding(), sinks=config.sinks,
            dropout_rate=config.attention_dropout, dtype=compute_dtype(config),
            implementation=None if config.implementation == 'auto' else config.implementation,
            cache_length=self.cache_length, name=name, **self._kernel_inits(),
        )  # fmt: skip

    def _feed_forward_layer(self) -> Any:
        """Return the MLP, or the mixture of experts."""
        config = self.config
        common: dict[str, Any] = dict(
            kind=config.mlp, features=config.mlp_width or None, use_bias=config.use_bias, dtype=compute_dtype(config),
            **self._kernel_inits(),
        )
        if not config.experts:
            return MLP(name='mlp', **common)
        return MixtureOfExperts(
            experts=config.experts, experts_per_token=config.experts_per_token,
            capacity_factor=config.capacity_factor or None, shared=config.shared_expert,
            # In the order of choices, a later token could take the place of an earlier token's second choice, which
            # would break causality.
            order='token',
            # A single renormalised weight is always 1, and the router would have no gradient from the output.
            renormalised=config.experts_per_token > 1,
            name='experts', **common,
        )  # fmt: skip

    def _kernel_inits(self) -> dict[str, Any]:
        """Return the initialisers of the kernels: `kernel_init`, and `out_init` for the last kernel of a branch."""
        std = self.config.init
        kernel_init = nn.initializers.lecun_normal() if std == 0 else nn.initializers.normal(std)
        if not self.config.scaled_init:
            return {'kernel_init': kernel_init, 'out_init': kernel_init}
        scale = 1.0 / math.sqrt(2 * self.config.layers)
        return {'kernel_init': kernel_init, 'out_init': lambda *args: kernel_init(*args) * scale}


def _norm(config: BlockConfig, name: str) -> nn.Module:
    if config.norm == 'rms':
        return nn.RMSNorm(epsilon=1e-6, dtype=compute_dtype(config), name=name)
    return nn.LayerNorm(epsilon=1e-5, use_bias=config.use_bias, dtype=compute_dtype(config), name=name)


class TransformerStack(nn.Module):
    """The blocks of a model, and a norm after the last one unless the order is 'post'.

    With `config.scan` the blocks are one compiled loop over stacked parameters [L, ...], so the size of the program
    does not depend on L; caches are stacked on the second axis, after the batch: [B, L, ...].

    `config.remat` selects what the backward pass recomputes: 'none', 'full' (the whole block) or 'dots' (everything but
    the results of matrix products).

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
        """Return the output of the last block, and `aux` of all blocks: a dict of arrays [L].

        The arguments are those of `TransformerBlock`.
        """
        block, x = self._rematerialised(TransformerBlock), shard_rows(x)
        inputs = mask, token_mask, deterministic, memory, memory_mask
        fields: Any = dict(
            config=self.config, encoding=self.encoding, cross=self.cross, cache_length=self.cache_length
        )
        # The rate of skipping a block grows linearly with its depth (Huang et al. 2016).
        drop_rates = np.linspace(0, self.config.layer_drop, self.config.layers + 1, dtype=np.float32)[1:]
        if self.config.scan:
            blocks = nn.scan(
                block, variable_axes={'params': 0, 'cache': 1, 'intermediates': 0},
                split_rngs={'params': True, 'dropout': True},
                in_axes=(*[nn.broadcast] * len(inputs), 0), length=self.config.layers,  # pyright: ignore[reportArgumentType]
                # See `attnlab.layers.recurrent.RecurrentLayer`.
                check_constancy_invariants=self.is_initializing(),
            )  # fmt: skip
            # In jax.shard_map, the carry of a scan needs the type that x has after a block.
            x = mesh_axes.match_varying_axes(x, mask, token_mask, memory, memory_mask, self.variables)
            x, aux = blocks(**fields, name='blocks')(x, *inputs, jnp.asarray(drop_rates))
        else:
            aux_by_layer = []
            for layer in range(self.config.layers):
                x, layer_aux = block(**fields, name=f'block_{layer}')(x, *inputs, float(drop_rates[layer]))
                aux_by_layer.append(layer_aux)
            aux = jax.tree.map(lambda *values: jnp.stack(values), *aux_by_layer)
        return (x if self.config.order == 'post' else _norm(self.config, 'norm')(x)), aux

    def _rematerialised(self, block: Any) -> Any:
        """Return the block class with the rematerialisation policy of the config."""
        # static_argnums counts the module as argument 0; argument 4 is `deterministic`, which must stay a Python bool.
        # In a scan, XLA cannot merge the recomputation with the forward pass, so the costly prevent_cse is not needed.
        remat = partial(nn.remat, block, prevent_cse=not self.config.scan, static_argnums=(4,))
        match self.config.remat:
            case 'none':
                return block
            case 'full':
                return remat()
            case 'dots':
                return remat(policy=jax.checkpoint_policies.checkpoint_dots)
