"""Recurrent cells, and recurrent layers over padded sequences."""

from functools import partial
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnlab.kernels import mesh_axes

CellState = Any
"""The state of a cell: [B, D] for a GRU; (memory cell, output), both [B, D], for an LSTM."""

CellKind = Literal['gru', 'lstm']


class GRUCell(nn.Module):
    """Gated recurrent unit (Cho et al. 2014), with the reset gate after the matrix product.

    cuDNN, PyTorch and Flax do the same.  A step has two matrix products, [*, 3D] each, where `flax.linen.GRUCell` has
    six; the gates are in the order r, z, n.

    original: applies the reset gate before the matrix product, which then needs a third product, and has no biases
      (Bahdanau et al. 2015, appendix A.1.1).
    """

    features: int
    original: bool = False

    @nn.compact
    def __call__(self, state: Float[Array, 'B D'], inputs: Float[Array, 'B I']) -> Float[Array, 'B D']:
        """Return the state [B, D] after one step, from the state before it [B, D] and the input [B, I]."""
        dense = partial(nn.Dense, use_bias=not self.original)
        state_gates = 2 if self.original else 3
        from_input = dense(3 * self.features, name='input')(inputs)
        from_state = dense(
            state_gates * self.features, name='hidden', kernel_init=orthogonal_per_gate(state_gates)
        )(state)  # fmt: skip
        xr, xz, xn = jnp.split(from_input, 3, axis=-1)
        hr, hz, *hn = jnp.split(from_state, state_gates, axis=-1)
        r, z = nn.sigmoid(xr + hr), nn.sigmoid(xz + hz)
        if self.original:
            reset_state = dense(self.features, name='candidate', kernel_init=nn.initializers.orthogonal())(r * state)
        else:
            reset_state = r * hn[0]
        n = jnp.tanh(xn + reset_state)
        return n + z * (state - n)


def orthogonal_per_gate(gates: int) -> nn.initializers.Initializer:
    """Return an initialiser of `gates` orthogonal [D, D] matrices side by side, one for each gate."""

    def init(key, shape, dtype=jnp.float32):
        orthogonal = nn.initializers.orthogonal()
        gate_shape = shape[0], shape[1] // gates
        matrices = [orthogonal(gate_key, gate_shape, dtype) for gate_key in jax.random.split(key, gates)]
        return jnp.concatenate(matrices, axis=1)

    return init


class RecurrentCell(nn.Module):
    """A GRU or an LSTM cell with one signature: (state, inputs) -> state.

    original: as in `GRUCell`; an LSTM has no such variant.
    """

    kind: CellKind
    features: int
    original: bool = False

    @nn.compact
    def __call__(self, state: CellState, inputs: Float[Array, 'B I']) -> CellState:
        """Return the state after one step.  Raises ValueError if the kind is unknown."""
        match self.kind:
            case 'gru':
                return GRUCell(self.features, self.original, name='gru')(state, inputs)
            case 'lstm':
                return nn.OptimizedLSTMCell(self.features, name='lstm')(state, inputs)[0]
            case _:
                raise ValueError(f"cell is {self.kind!r}; expected 'gru' or 'lstm'")


def cell_output(state: CellState) -> Float[Array, 'B D']:
    """Return the output [B, D] of a cell in this state, which other layers read."""
    return state[1] if isinstance(state, tuple) else state


def state_from_output(kind: CellKind, output: Float[Array, 'B D']) -> CellState:
    """Return a state with this output [B, D]; the memory cell of an LSTM has the same values."""
    return (output, output) if kind == 'lstm' else output


class RecurrentLayer(nn.Module):
    """One recurrent layer in one direction over padded sequences.

    Padding leaves the state unchanged: the values in padding have no effect, and the state after the last step is the
    state after the last real token.  A reverse layer meets the padding first, so it starts at the last real token.

    original: as in `GRUCell`.
    """

    kind: CellKind
    features: int
    reverse: bool = False
    original: bool = False

    @nn.compact
    def __call__(
        self,
        inputs: Float[Array, 'B S I'],
        token_mask: Bool[Array, 'B S'],
        state: CellState | None = None,
        starts: Bool[Array, 'B S'] | None = None,
    ) -> tuple[Float[Array, 'B S D'], CellState]:
        """Return the outputs [B, S, D] and the state after the last token.

        Args:
          inputs: [B, S, I].
          token_mask: [B, S], True for real tokens.
          state: the state before the first token; None: zeros.
          starts: [B, S], True for the first token of each new sequence, before which the state is reset to the state
            before the first token of the row.
        """
        zeros = state_from_output(self.kind, jnp.zeros((inputs.shape[0], self.features), inputs.dtype))
        initial_state = zeros if state is None else state

        def select(rows, if_true, if_false):
            return jax.tree.map(lambda x, y: jnp.where(rows[:, None], x, y), if_true, if_false)

        def step(cell, state, step_inputs):
            inputs, token_mask, *starts = step_inputs
            before = select(starts[0], initial_state, state) if starts else state
            state = select(token_mask, cell(before, inputs), before)
            return state, cell_output(state)

        scan = nn.scan(
            step, variable_broadcast='params', split_rngs={'params': False},
            in_axes=1, out_axes=1, reverse=self.reverse,
            # The check traces the loop a second time, and in that trace jax 0.12 does not support callbacks.
            check_constancy_invariants=self.is_initializing(),
        )  # fmt: skip
        scanned = (inputs, token_mask) if starts is None else (inputs, token_mask, starts)
        # In jax.shard_map, the state varies over the mesh axes of everything that a step reads.
        initial_state = mesh_axes.match_varying_axes(initial_state, scanned, self.variables)
        cell = RecurrentCell(self.kind, self.features, self.original, name='cell')
        last, outputs = scan(cell, initial_state, scanned)
        return outputs, last


class RecurrentEncoder(nn.Module):
    """A stack of recurrent layers in one or two directions.

    bidirectional: both directions in each layer, whose outputs are concatenated to [B, S, 2D].
    reverse: reads from the last token to the first (Sutskever et al. 2014, section 3.3).  The outputs stay in the order
      of the inputs, so attention to them needs no reversal.
    dropout: dropout rate between layers.
    original: as in `GRUCell`.
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
        self, inputs: Float[Array, 'B S I'], token_mask: Bool[Array, 'B S'], deterministic: bool
    ) -> tuple[Float[Array, 'B S C'], Float[Array, 'B C']]:
        """Return the states [B, S, C] of the last layer, and the last state of each of its directions [B, C].

        C is D, or 2D with two directions.  token_mask: [B, S], True for real tokens.
        """
        x, last = inputs, inputs[:, 0]
        for layer in range(self.layers):
            if layer:
                x = nn.Dropout(self.dropout)(x, deterministic=deterministic)
            directions = (self.reverse, not self.reverse) if self.bidirectional else (self.reverse,)
            results = []
            for reverse in directions:
                name = f'backward_{layer}' if reverse else f'forward_{layer}'
                recurrent = RecurrentLayer(self.kind, self.features, reverse, self.original, name=name)
                results.append(recurrent(x, token_mask))
            x = jnp.concatenate([outputs for outputs, _ in results], axis=-1)
            last = jnp.concatenate([cell_output(state) for _, state in results], axis=-1)
        return x, last
