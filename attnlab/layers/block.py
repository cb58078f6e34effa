"""The Transformer block and a stack of them, from the original to today's: each variant is one field of a `Recipe`."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from attnlab.kernels import axes
from attnlab.kernels.axes import spread
from attnlab.kernels.call import check_rate
from attnlab.kernels.masks import Visibility, window
from attnlab.layers.experts import Experts
from attnlab.layers.mixers import CausalConvolution, Recurrence
from attnlab.layers.mlp import MLP
from attnlab.layers.multihead import MultiHeadAttention, Rotary
from attnlab.layers.patches import GridRotary
from attnlab.layers.positions import RelativeBias

Norm = Literal['layer', 'rms']
Order = Literal['pre', 'post', 'sandwich']
Mixer = Literal['attention', 'convolution', 'gru', 'lstm']


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How every block of a model is made.

    heads: N.  kv_heads: K, N if None.  head_width: H, D / N if None.
    mixer: 'attention', or what reads the sequence in its place: a causal convolution of `taps`, a GRU or an LSTM.
    qk_norm, rotary, sinks, alibi: as in `MultiHeadAttention`.  window: keys before the query that it may see.
    relative: a learned bias of the distance, a table a layer (Raffel et al. 2020, who share one between layers).
    norm: 'layer' (Ba et al. 2016) or 'rms' (Zhang and Sennrich 2019).
    order: 'post' x + f(x), then the norm (Vaswani et al. 2017); 'pre' x + f(norm(x)) (Xiong et al. 2020); 'sandwich'
      x + norm(f(norm(x))) (Ding et al. 2021).
    parallel: attention and MLP side by side on one norm (Wang and Komatsuzaki 2021), not one after the other.
    mlp: its kind; mlp_width: F; its kind's own if None.
    experts: E of them in place of the MLP, `active` A a token; 0 for none.  capacity_factor, shared: as in `Experts`.
      One alone weighs its probability (Fedus et al. 2021, section 2.1); of more the weights add up to 1.
    use_bias: on products and norms.  dropout: of what a branch adds.  attention_dropout: of attention weights.
    layer_drop: the rate at which, in training, a row passes the last block by, and l / L of it for block l of L; what a
      block adds to the others grows by 1 / (1 - rate) (stochastic depth, Huang et al. 2016, section 3).
    scaled_init: whether what leads out of a branch starts smaller by sqrt(2 L) (Radford et al. 2019, section 2.3).
    init: the standard deviation of a normal start, of all kernels; Flax's own if None.
    implementation: of attention, as in `attnlab.dot_product_attention`.
    slots: of the key-value cache, 0 for none: as in `MultiHeadAttention`; other mixers keep what they need.
    """

    heads: int
    kv_heads: int | None = None
    head_width: int | None = None
    mixer: Mixer = 'attention'
    taps: int = 4
    qk_norm: Literal['l2', 'rms'] | None = None
    rotary: Rotary | GridRotary | None = None
    sinks: bool = False
    alibi: bool = False
    relative: bool = False
    window: int | None = None
    norm: Norm = 'layer'
    order: Order = 'pre'
    parallel: bool = False
    mlp: str = 'gelu'
    mlp_width: int | None = None
    experts: int = 0
    active: int = 1
    capacity_factor: float | None = None
    shared: bool = False
    use_bias: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    layer_drop: float = 0.0
    scaled_init: bool = False
    init: float | None = None
    dtype: Any = None
    implementation: str | tuple[str, ...] | None = None
    slots: int = 0


class Block(nn.Module):
    """One block: attention, then an MLP or experts, each added to what came in (Vaswani et al. 2017, section 3.1).

    layers: of the whole model, for `scaled_init`.  cross: attention to a memory comes between the two.
    """

    recipe: Recipe
    layers: int
    cross: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'B T D'],
        rules: Visibility,
        real: Bool[Array, 'B T'] | None,
        deterministic: bool,
        memory: Float[Array, 'B S D'] | None = None,
        seen: Visibility | None = None,
        drop_rate: Float[Array, ''] | float = 0.0,
    ) -> tuple[Float[Array, 'B T D'], dict[str, Array]]:
        """x after the block, and what its experts say of themselves: nothing without experts.

        real: which tokens count, for experts and for what is kept of them; all if None.
        memory, seen: what a cross block attends to, and who may attend to what of it.
        drop_rate: this block's, where the recipe has a `layer_drop`.
        """
        recipe, said, came = self.recipe, {}, x
        check_rate(recipe.layer_drop)
        drop = nn.Dropout(recipe.dropout, deterministic=deterministic)
        mix, feed = self._mixer(), self._feed()

        def think(x: Array) -> Array:
            if not recipe.experts:
                return feed(x, deterministic=deterministic)
            output, stats = feed(x, real, deterministic=deterministic)
            said.update(stats)
            return output

        def add(x: Array, branch: Callable[[Array], Array], name: str) -> Array:
            norm = lambda x, name: _norm(recipe, name)(x)
            match recipe.order:
                case 'pre':
                    return x + drop(branch(norm(x, f'{name}_norm')))
                case 'post':
                    return norm(x + drop(branch(x)), f'{name}_norm')
                case 'sandwich':
                    return x + drop(norm(branch(norm(x, f'{name}_norm')), f'{name}_out_norm'))
                case other:
                    raise ValueError(f"order is {other!r}; expected 'pre', 'post' or 'sandwich'")

        if recipe.parallel:
            if recipe.order != 'pre' or self.cross:
                raise ValueError(f"parallel blocks have order 'pre' and no cross-attention, not {recipe.order!r}")
            normed = _norm(recipe, 'attention_norm')(x)
            x = x + drop(mix(normed, rules, real, deterministic)) + drop(think(normed))
        else:
            x = add(x, lambda x: mix(x, rules, real, deterministic), 'attention')
            if self.cross:
                look = self._attention('cross_attention')
                x = add(x, lambda x: look(x, memory, mask=seen, deterministic=deterministic), 'cross_attention')
            x = add(x, think, 'mlp')
        if recipe.layer_drop and not deterministic:
            stays = jax.random.bernoulli(self.make_rng('dropout'), 1.0 - drop_rate, (x.shape[0], 1, 1))
            x = came + jnp.where(stays, (x - came) / (1.0 - drop_rate), 0.0).astype(x.dtype)
        return spread(x), said

    def _mixer(self) -> Callable[[Array, Visibility, Array | None, bool], Array]:
        """(x, rules, real, deterministic) -> what the tokens gather from each other."""
        recipe = self.recipe
        match recipe.mixer:
            case 'attention':
                return self._attend
            case 'convolution':
                layer = CausalConvolution(
                    recipe.taps, recipe.use_bias, self._starts()['out_init'], recipe.dtype, recipe.slots > 0,
                    name='convolution',
                )  # fmt: skip
            case 'gru' | 'lstm' as kind:
                layer = Recurrence(kind, recipe.slots > 0, name='recurrence')
            case other:
                raise ValueError(f"mixer is {other!r}; expected 'attention', 'convolution', 'gru' or 'lstm'")
        return lambda x, rules, real, deterministic: layer(x, rules.query_segment_ids, real)

    def _attend(self, x: Array, rules: Visibility, real: Array | None, deterministic: bool) -> Array:
        recipe = self.recipe
        if recipe.window is not None:
            rules = rules & window(recipe.window, 0)
        bias = None
        if recipe.relative:
            T, S = x.shape[1], recipe.slots or x.shape[1]
            here = jnp.arange(T)[None] if rules.query_positions is None else rules.query_positions
            there = jnp.arange(S)[None] if rules.key_positions is None else rules.key_positions
            bias = RelativeBias(recipe.heads, bidirectional=not rules.is_causal, name='relative_bias')(here, there)
        return self._attention('attention')(x, mask=rules, bias=bias, deterministic=deterministic)

    def _attention(self, name: str) -> Any:
        """An attention layer; called as it is here, it gives one array."""
        recipe, cross = self.recipe, name != 'attention'
        return MultiHeadAttention(
            recipe.heads, recipe.kv_heads, recipe.head_width, use_bias=recipe.use_bias, qk_norm=recipe.qk_norm,
            rotary=None if cross else recipe.rotary, sinks=recipe.sinks, alibi=recipe.alibi and not cross,
            dropout_rate=recipe.attention_dropout, dtype=recipe.dtype, implementation=recipe.implementation,
            slots=recipe.slots, name=name, **self._starts(),
        )  # fmt: skip

    def _feed(self) -> Any:
        recipe = self.recipe
        common: dict[str, Any] = dict(
            kind=recipe.mlp, features=recipe.mlp_width, use_bias=recipe.use_bias, dtype=recipe.dtype, **self._starts()
        )
        if not recipe.experts:
            return MLP(name='mlp', **common)
        return Experts(
            experts=recipe.experts, active=recipe.active, capacity_factor=recipe.capacity_factor, shared=recipe.shared,
            order='token',  # by choices, a later token could take the place of an earlier one's second
            renormalised=recipe.active > 1,  # of one alone it would always be 1, and teach the router nothing
            name='experts', **common,
        )  # fmt: skip

    def _starts(self) -> dict[str, Any]:
        """The starts of kernels that lead into a branch and out of it."""
        std = self.recipe.init
        into = nn.initializers.lecun_normal() if std is None else nn.initializers.normal(std)
        if not self.recipe.scaled_init:
            return {'kernel_init': into, 'out_init': into}
        scale = 1.0 / math.sqrt(2 * self.layers)
        return {'kernel_init': into, 'out_init': lambda *args: into(*args) * scale}


def _norm(recipe: Recipe, name: str) -> nn.Module:
    match recipe.norm:
        case 'layer':
            return nn.LayerNorm(epsilon=1e-5, use_bias=recipe.use_bias, dtype=recipe.dtype, name=name)
        case 'rms':
            return nn.RMSNorm(epsilon=1e-6, dtype=recipe.dtype, name=name)
        case other:
            raise ValueError(f"norm is {other!r}; expected 'layer' or 'rms'")


class Stack(nn.Module):
    """The blocks of a model, one after the other, and the norm behind the last where they put theirs in front.

    scan: blocks as one compiled loop over stacked parameters [L, ...]: the program does not grow with L.  What they
      keep is stacked behind the batch, [B, L, ...].
    remat: what the backward pass computes again rather than keeps: 'none', 'full' all of a block, 'dots' all but the
      results of matrix products.
    cross: as in `Block`.
    """

    recipe: Recipe
    layers: int
    scan: bool = False
    remat: Literal['none', 'full', 'dots'] = 'none'
    cross: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'B T D'],
        rules: Visibility,
        real: Bool[Array, 'B T'] | None = None,
        deterministic: bool = True,
        memory: Float[Array, 'B S D'] | None = None,
        seen: Visibility | None = None,
    ) -> tuple[Float[Array, 'B T D'], dict[str, Array]]:
        """x after all blocks, and what the experts of each say, [L]."""
        block, x = self._remat(Block), spread(x)
        common = rules, real, deterministic, memory, seen
        rates = np.linspace(0, self.recipe.layer_drop, self.layers + 1, dtype=np.float32)[1:]
        if self.scan:
            blocks = nn.scan(
                block, variable_axes={'params': 0, 'cache': 1, 'intermediates': 0},
                split_rngs={'params': True, 'dropout': True},
                in_axes=(*[nn.broadcast] * len(common), 0), length=self.layers,  # pyright: ignore[reportArgumentType]
                check_constancy_invariants=self.is_initializing(),  # as in `attnlab.layers.recurrent`
            )  # fmt: skip
            x = axes.vary(x, rules, real, memory, seen, self.variables)  # as a block makes it inside of jax.shard_map
            x, said = blocks(self.recipe, self.layers, self.cross, name='blocks')(x, *common, jnp.asarray(rates))
        else:
            each = []
            for layer in range(self.layers):
                made = block(self.recipe, self.layers, self.cross, name=f'block_{layer}')
                x, said = made(x, *common, float(rates[layer]))
                each.append(said)
            said = jax.tree.map(lambda *x: jnp.stack(x), *each) if each else {}
        return (x if self.recipe.order == 'post' else _norm(self.recipe, 'norm')(x)), said

    def _remat(self, block: Any) -> Any:
        # Argument 0 is the module; a flag in Python must stay one.  Inside a scan nothing is found to be common anyway.
        wrap = lambda **policy: nn.remat(block, prevent_cse=not self.scan, static_argnums=(4,), **policy)
        match self.remat:
            case 'none':
                return block
            case 'full':
                return wrap()
            case 'dots':
                return wrap(policy=jax.checkpoint_policies.checkpoint_dots)
            case other:
                raise ValueError(f"remat is {other!r}; expected 'none', 'full' or 'dots'")
