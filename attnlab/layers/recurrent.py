"""Recurrent cells and their run over a padded sequence."""

from functools import partial
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnlab.kernels import mesh_axes

CellState = Any
"""What a cell carries: [B, D] for a GRU, (cell, output), both [B, D], for an LSTM."""

CellKind = Literal['gru', 'lstm']


class GRUCell(nn.Module):
    """Gated recurrent unit (Cho et al. 2014), with the reset gate behind the product as in cuDNN, PyTorch and Flax.

    Two matrix products a step, [*, 3D] each, where `flax.linen.GRUCell` has six: gates in the order r, z, n.
    original: the reset gate before the product, which takes a third one, and no biases (Bahdanau et al. 2015, A.1.1).
    """

    features: int
    original: bool = False

    @nn.compact
    def __call__(self, state: Float[Array, 'B D'], inputs: Float[Array, 'B I']) -> Float[Array, 'B D']:
        """One step: the state before it [B, D] and its input [B, I] give the state after it [B, D]."""
        dense = partial(nn.Dense, use_bias=not self.original)
        gates = 2 if self.original else 3
        from_input = dense(3 * self.features, name='input')(inputs)
        from_state = dense(gates * self.features, name='hidden', kernel_init=orthogonal_per_gate(gates))(state)
        (xr, xz, xn), (hr, hz, *hn) = jnp.split(from_input, 3, axis=-1), jnp.split(from_state, gates, axis=-1)
        r, z = nn.sigmoid(xr + hr), nn.sigmoid(xz + hz)
        if self.original:
            recalled = dense(self.features, name='candidate', kernel_init=nn.initializers.orthogonal())(r * state)
        else:
            recalled = r * hn[0]
        n = jnp.tanh(xn + recalled)
        return n + z * (state - n)


def orthogonal_per_gate(count: int) -> nn.initializers.Initializer:
    """`count` orthogonal [D, D] matrices side by side, one a gate."""

    def init(key, shape, dtype=jnp.float32):
        one = nn.initializers.orthogonal()
        width = shape[1] // count
        return jnp.concatenate([one(k, (shape[0], width), dtype) for k in jax.random.split(key, count)], axis=1)

    return init


class RecurrentCell(nn.Module):
    """A GRU or an LSTM cell behind one signature: (state, inputs) -> state; `original` as in `GRUCell`."""

    kind: CellKind
    features: int
    original: bool = False

    @nn.compact
    def __call__(self, state: CellState, inputs: Float[Array, 'B I']) -> CellState:
        match self.kind:
            case 'gru':
                return GRUCell(self.features, self.original, name='gru')(state, inputs)
            case 'lstm':
                return nn.OptimizedLSTMCell(self.features, name='lstm')(state, inputs)[0]
            case _:
                raise ValueError(f"cell is {self.kind!r}; expected 'gru' or 'lstm'")


def cell_output(state: CellState) -> Float[Array, 'B D']:
    """What the rest of the network sees of a state."""
    return state[1] if isinstance(state, tuple) else state


def state_from_output(kind: CellKind, output: Float[Array, 'B D']) -> CellState:
    """A state that shows `output`; the memory cell of an LSTM starts there too."""
    return (output, output) if kind == 'lstm' else output


class RecurrentLayer(nn.Module):
    """One direction of one layer over a padded sequence.

    Padding holds the state still: what stands there changes nothing, the state after the last step is the one after
    the last real token, and a reverse run, which meets the padding first, starts at the last real token.
    """

    kind: CellKind
    features: int
    reverse: bool = False
    original: bool = False

    @nn.compact
    def __call__(
        self,
        inputs: Float[Array, 'B S I'],
        mask: Bool[Array, 'B S'],
        state: CellState | None = None,
        starts: Bool[Array, 'B S'] | None = None,
    ) -> tuple[Float[Array, 'B S D'], CellState]:
        """The outputs [B, S, D] and the state after the last token.

        mask: [B, S], True on tokens.  state: the one before the first token; zeros if None.
        starts: [B, S], True on tokens before which the state is that first one again.
        """
        zeros = state_from_output(self.kind, jnp.zeros((inputs.shape[0], self.features), inputs.dtype))
        first = zeros if state is None else state
        choose = lambda at, one, other: jax.tree.map(lambda x, y: jnp.where(at[:, None], x, y), one, other)

        def step(cell, state, x):
            inputs, mask, *starts = x
            before = choose(starts[0], first, state) if starts else state
            state = choose(mask, cell(before, inputs), before)
            return state, cell_output(state)

        scan = nn.scan(
            step, variable_broadcast='params', split_rngs={'params': False},
            in_axes=1, out_axes=1, reverse=self.reverse,
            check_constancy_invariants=self.is_initializing(),  # a second trace, in which jax 0.12 takes no callback
        )  # fmt: skip
        along = (inputs, mask) if starts is None else (inputs, mask, starts)
        # Their types inside of jax.shard_map: a state varies over the mesh axes of all that a step reads.
        first = mesh_axes.match_varying_axes(first, along, self.variables)
        last, outputs = scan(RecurrentCell(self.kind, self.features, self.original, name='cell'), first, along)
        return outputs, last


class RecurrentEncoder(nn.Module):
    """Layers of recurrence, one- or two-directional (two: outputs side by side, [B, S, 2D]).

    `reverse` reads from the last token to the first (Sutskever et al. 2014, section 3.3); the outputs stay in the
    order of the inputs, so whatever attends to them needs no turning round.
    """

    kind: CellKind
    features: int
    layers: int
    bidirectional: bool
    reverse: bool
    dropout: float
    original: bool = False

    @nn.compact
    def __call__(
        self, inputs: Float[Array, 'B S I'], mask: Bool[Array, 'B S'], deterministic: bool
    ) -> tuple[Float[Array, 'B S C'], Float[Array, 'B C']]:
        """inputs [B, S, I], mask [B, S]: the states [B, S, C] and the last of each direction [B, C]; C is D or 2D."""
        x, last = inputs, inputs[:, 0]
        for layer in range(self.layers):
            if layer:
                x = nn.Dropout(self.dropout)(x, deterministic=deterministic)
            directions = (self.reverse, not self.reverse) if self.bidirectional else (self.reverse,)
            names = {False: f'forward_{layer}', True: f'backward_{layer}'}
            runs = [
                RecurrentLayer(self.kind, self.features, way, self.original, name=names[way])(x, mask)
                for way in directions
            ]
            x = jnp.concatenate([outputs for outputs, _ in runs], axis=-1)
            last = jnp.concatenate([cell_output(state) for _, state in runs], axis=-1)
        return x, last
