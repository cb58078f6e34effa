"""The Transformer block and a stack of them, from the original to today's: each variant is one field of a `Recipe`."""

import dataclasses
import math
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attnlab.kernels.masks import Visibility, window
from attnlab.layers.experts import Experts
from attnlab.layers.mlp import MLP
from attnlab.layers.multihead import MultiHeadAttention, Rotary

Norm = Literal['layer', 'rms']
Order = Literal['pre', 'post', 'sandwich']


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How every block of a model is made.

    heads: N.  kv_heads: K, N if None.  head_width: H, D / N if None.
    qk_norm, rotary, sinks, alibi: as in `MultiHeadAttention`.  window: keys before the query that it may see.
    norm: 'layer' (Ba et al. 2016) or 'rms' (Zhang and Sennrich 2019).
    order: 'post' x + f(x), then the norm (Vaswani et al. 2017); 'pre' x + f(norm(x)) (Xiong et al. 2020); 'sandwich'
      x + norm(f(norm(x))) (Ding et al. 2021).
    parallel: attention and MLP side by side on one norm (Wang and Komatsuzaki 2021), not one after the other.
    mlp: its kind; mlp_width: F; its kind's own if None.
    experts: E of them in place of the MLP, `active` A a token; 0 for none.  capacity_factor, shared: as in `Experts`.
    use_bias: on products and norms.  dropout: of what a branch adds.  attention_dropout: of attention weights.
    scaled_init: whether what leads out of a branch starts smaller by sqrt(2 L) (Radford et al. 2019, section 2.3).
    init: the standard deviation of a normal start, of all kernels; Flax's own if None.
    """

    heads: int
    kv_heads: int | None = None
    head_width: int | None = None
    qk_norm: Literal['l2', 'rms'] | None = None
    rotary: Rotary | None = None
    sinks: bool = False
    alibi: bool = False
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
    scaled_init: bool = False
    init: float | None = None
    dtype: Any = None


class Block(nn.Module):
    """One block: attention, then an MLP or experts, each added to what came in (Vaswani et al. 2017, section 3.1)."""

    recipe: Recipe
    layers: int  # of the whole model, for `scaled_init`

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'B T D'],
        rules: Visibility,
        positions: Int[Array, '#B T'] | None,
        real: Bool[Array, 'B T'] | None,
        deterministic: bool,
    ) -> tuple[Float[Array, 'B T D'], dict[str, Array]]:
        """x after the block, and what its experts say of themselves: nothing without experts.

        real: which tokens count for the experts; all if None.
        """
        recipe, said = self.recipe, {}
        if recipe.window is not None:
            rules = rules & window(recipe.window, 0)
        attention, feed = self._attention(), self._feed()

        def attend(x: Array) -> Array:
            output = attention(x, mask=rules, positions=positions, deterministic=deterministic)
            assert not isinstance(output, tuple)  # no weights were asked for
            return output

        def think(x: Array) -> Array:
            if not recipe.experts:
                return feed(x)
            output, stats = feed(x, real)
            said.update(stats)
            return output

        norm = lambda name: _norm(recipe, name)
        drop = nn.Dropout(recipe.dropout, deterministic=deterministic)
        match recipe.order, recipe.parallel:
            case 'pre', False:
                x = x + drop(attend(norm('attention_norm')(x)))
                x = x + drop(think(norm('mlp_norm')(x)))
            case 'pre', True:
                normed = norm('attention_norm')(x)
                x = x + drop(attend(normed)) + drop(think(normed))
            case 'post', False:
                x = norm('attention_norm')(x + drop(attend(x)))
                x = norm('mlp_norm')(x + drop(think(x)))
            case 'sandwich', False:
                x = x + drop(norm('attention_out_norm')(attend(norm('attention_norm')(x))))
                x = x + drop(norm('mlp_out_norm')(think(norm('mlp_norm')(x))))
            case order, parallel:
                expected = "'pre', 'post' or 'sandwich', and 'pre' where parallel"
                raise ValueError(f'order is {order!r} and parallel {parallel}; expected {expected}')
        return x, said

    def _attention(self) -> MultiHeadAttention:
        recipe = self.recipe
        return MultiHeadAttention(
            recipe.heads, recipe.kv_heads, recipe.head_width, use_bias=recipe.use_bias, qk_norm=recipe.qk_norm,
            rotary=recipe.rotary, sinks=recipe.sinks, alibi=recipe.alibi, dropout_rate=recipe.attention_dropout,
            dtype=recipe.dtype, name='attention', **self._starts(),
        )  # fmt: skip

    def _feed(self) -> nn.Module:
        recipe = self.recipe
        common: dict[str, Any] = dict(kind=recipe.mlp, features=recipe.mlp_width, dtype=recipe.dtype, **self._starts())
        if not recipe.experts:
            return MLP(use_bias=recipe.use_bias, name='mlp', **common)
        return Experts(
            experts=recipe.experts, active=recipe.active, capacity_factor=recipe.capacity_factor, shared=recipe.shared,
            order='token',  # by choices, a later token could take the place of an earlier one's second
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

    scan: blocks as one compiled loop over stacked parameters [L, ...]: the program does not grow with L.
    remat: what the backward pass computes again rather than keeps: 'none', 'full' all of a block, 'dots' all but the
      results of matrix products.
    """

    recipe: Recipe
    layers: int
    scan: bool = False
    remat: Literal['none', 'full', 'dots'] = 'none'

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'B T D'],
        rules: Visibility,
        positions: Int[Array, '#B T'] | None = None,
        real: Bool[Array, 'B T'] | None = None,
        deterministic: bool = True,
    ) -> tuple[Float[Array, 'B T D'], dict[str, Array]]:
        """x after all blocks, and what the experts of each say, [L]."""
        block = self._remat(Block)
        if self.scan:
            blocks = nn.scan(
                block, variable_axes={'params': 0}, split_rngs={'params': True, 'dropout': True},
                in_axes=nn.broadcast, length=self.layers,  # pyright: ignore[reportArgumentType]
            )  # fmt: skip
            x, said = blocks(self.recipe, self.layers, name='blocks')(x, rules, positions, real, deterministic)
        else:
            each = []
            for layer in range(self.layers):
                named = block(self.recipe, self.layers, name=f'block_{layer}')
                x, said = named(x, rules, positions, real, deterministic)
                each.append(said)
            said = jax.tree.map(lambda *x: jnp.stack(x), *each)
        return (x if self.recipe.order == 'post' else _norm(self.recipe, 'norm')(x)), said

    def _remat(self, block: Any) -> Any:
        # Argument 0 is the module; a flag in Python must stay one.  Inside a scan nothing is found to be common anyway.
        wrap = lambda **policy: nn.remat(block, prevent_cse=not self.scan, static_argnums=(5,), **policy)
        match self.remat:
            case 'none':
                return block
            case 'full':
                return wrap()
            case 'dots':
                return wrap(policy=jax.checkpoint_policies.checkpoint_dots)
            case other:
                raise ValueError(f"remat is {other!r}; expected 'none', 'full' or 'dots'")
