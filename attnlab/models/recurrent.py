"""Recurrent encoder-decoder models, with a fixed context or with attention to the source."""

from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attnlab.configs.align import RecurrentConfig
from attnlab.kernels import mesh_axes
from attnlab.kernels.masks import length_mask
from attnlab.layers.recurrent import CellState, RecurrentCell, RecurrentEncoder, cell_output, state_from_output
from attnlab.layers.source_attention import SourceAttention


class EncodedSource(NamedTuple):
    """The encoded source sentences of a batch, which the decoder reads.

    memory: [B, S, C], the encoder states; or [B, C], the last state, if the context is fixed.
    keys: [B, S, H], from `SourceAttention.project_keys`; None if the context is fixed.
    lengths: [B], the number of real tokens in each sentence.
    """

    memory: Float[Array, 'B S C'] | Float[Array, 'B C']
    keys: Float[Array, 'B S H'] | None
    lengths: Int[Array, ' B']


class DecoderStep(nn.Module):
    """One decoder step: the context c_t from s_{t-1}, then the state s_t = g(y_{t-1}, s_{t-1}, c_t).

    Without attention, c_t is the same at every step.
    """

    config: RecurrentConfig

    def setup(self) -> None:
        """Create the cell, and the attention if the config has one."""
        config = self.config
        self.recurrence = RecurrentCell(config.cell, config.hidden, config.original)
        if config.attention != 'none':
            self.attend = SourceAttention(config.attention, config.hidden, use_bias=not config.original)

    def prepare_source(
        self, states: Float[Array, 'B S C'], last: Float[Array, 'B C'], lengths: Int[Array, ' B']
    ) -> EncodedSource:
        """Return the encoded source, computed once for each sentence, from the states and the last state."""
        if self.config.attention == 'none':
            return EncodedSource(last, None, lengths)
        return EncodedSource(states, self.attend.project_keys(states), lengths)

    def __call__(
        self, state: CellState, source: EncodedSource, previous: Float[Array, 'B E']
    ) -> tuple[CellState, tuple[Float[Array, 'B D'], Float[Array, 'B C'], Float[Array, 'B S']]]:
        """Return the next state, and the input of the logits: an output [B, D], the context, the attention weights.

        The output is that of s_t, or with `config.original` that of s_{t-1}.  The weights are [B, 0] without attention.

        previous: [B, E], the embedding of the previous token y_{t-1}.
        """
        if source.keys is None:
            context, weights = source.memory, jnp.zeros((previous.shape[0], 0), previous.dtype)
        else:
            context, weights = self.attend(cell_output(state), source.keys, source.memory, source.lengths)
        next_state = self.recurrence(state, jnp.concatenate([previous, context], axis=-1))
        return next_state, (cell_output(state if self.config.original else next_state), context, weights)


class RecurrentSeq2Seq(nn.Module):
    """Encoder-decoder of Cho et al. 2014 (`attention='none'`) and Bahdanau et al. 2015.

    Token 0 is padding everywhere.  A source is [tokens, EOS], a decoder input [BOS, tokens].

    With `config.original` the model is that of appendix A of Bahdanau et al. 2015: a GRU with additive attention or
    none.  There are no biases.  The decoder starts from the backward state alone.  The logits are computed from
    s_{t-1}, c_t and y_{t-1} by a maxout layer of hidden / 2 units and an output matrix of its own; without
    `config.original`, they are computed from s_t by a tanh layer and the target embedding.

    source_vocabulary, target_vocabulary: sizes of the vocabularies.
    """

    source_vocabulary: int
    target_vocabulary: int
    config: RecurrentConfig

    def setup(self) -> None:
        """Create the layers."""
        config = self.config
        init = nn.initializers.normal(config.embedding**-0.5)
        self.embed_source = nn.Embed(self.source_vocabulary, config.embedding, embedding_init=init)
        self.embed_target = nn.Embed(self.target_vocabulary, config.embedding, embedding_init=init)
        self.encoder = RecurrentEncoder(
            config.cell, config.hidden, config.encoder_layers, config.bidirectional, config.reverse_source,
            config.dropout, config.original,
        )  # fmt: skip
        self.start = nn.Dense(config.hidden, use_bias=not config.original)
        self.step = DecoderStep(config)
        if config.original:
            self.read = nn.Dense(config.hidden, use_bias=False)
            self.output = nn.Dense(self.target_vocabulary, use_bias=False)
        else:
            self.read = nn.Dense(config.embedding)
            self.bias = self.param('bias', nn.initializers.zeros, (self.target_vocabulary,), jnp.float32)
        self.drop = nn.Dropout(config.dropout)

    def encode(self, source: Int[Array, 'B S'], deterministic: bool = True) -> tuple[CellState, EncodedSource]:
        """Return the first state of the decoder, and the encoded source, for source tokens [B, S]."""
        lengths = jnp.sum(source != 0, axis=1)
        embedded = self.drop(self.embed_source(source), deterministic=deterministic)
        states, last = self.encoder(embedded, length_mask(lengths, source.shape[1]), deterministic)
        states, last = (self.drop(x, deterministic=deterministic) for x in (states, last))
        config = self.config
        # With two directions, the state of the backward one is the second half of `last`.
        start_input = last[:, -config.hidden :] if config.original else last
        first_state = state_from_output(config.cell, jnp.tanh(self.start(start_input)))
        return first_state, self.step.prepare_source(states, last, lengths)

    def logits(
        self,
        state: Float[Array, '*B D'],
        context: Float[Array, '*B C'],
        previous: Float[Array, '*B E'],
        deterministic: bool,
    ) -> Float[Array, '*B V']:
        """Return the logits [..., V].

        Args:
          state: [..., D], the output of s_t, or with `config.original` of s_{t-1}.
          context: [..., C], c_t.
          previous: [..., E], the embedding of y_{t-1}.
          deterministic: no dropout.
        """
        read = self.read(jnp.concatenate([state, context, previous], axis=-1))
        if self.config.original:
            read = jnp.max(read.reshape(*read.shape[:-1], -1, 2), axis=-1)
        else:
            read = jnp.tanh(read)
        # One product over flattened rows: with separate batch and time axes, the CPU takes twice the time.
        rows = self.drop(read, deterministic=deterministic).reshape(-1, read.shape[-1])
        logits = self.output(rows) if self.config.original else self.embed_target.attend(rows) + self.bias[None]
        return logits.reshape(*read.shape[:-1], -1)

    def decode(
        self, state: CellState, source: EncodedSource, tokens: Int[Array, ' B']
    ) -> tuple[CellState, Float[Array, 'B V'], Float[Array, 'B S']]:
        """Return the next state, the logits [B, V] and the attention weights [B, S], from the previous tokens [B]."""
        previous = self.embed_target(tokens)
        state, (output, context, weights) = self.step(state, source, previous)
        return state, self.logits(output, context, previous, True), weights

    def __call__(
        self, source: Int[Array, 'B S'], inputs: Int[Array, 'B T'], deterministic: bool = True
    ) -> tuple[Float[Array, 'B T V'], Float[Array, 'B T keys']]:
        """Return logits [B, T, V] and attention weights for source [B, S] and decoder inputs [B, T] (teacher forcing).

        Row t of the weights [B, T, S] belongs to token t of the output.  They are [B, T, 0] if the context is fixed.
        Unless `deterministic`, dropout draws from the `dropout` stream of rngs.
        """
        state, encoded = self.encode(source, deterministic)
        previous = self.drop(self.embed_target(inputs), deterministic=deterministic)
        scan = nn.scan(
            lambda step, state, previous: step(state, encoded, previous),
            variable_broadcast='params', split_rngs={'params': False}, in_axes=1, out_axes=1,
            # See `attnlab.layers.recurrent.RecurrentLayer`.
            check_constancy_invariants=self.is_initializing(),
        )  # fmt: skip
        # In jax.shard_map, the carry of a scan needs the type that the state has after a step.
        state = mesh_axes.match_varying_axes(state, encoded, previous, self.variables)
        _, (states, contexts, weights) = scan(self.step, state, previous)
        return self.logits(states, contexts, previous, deterministic), weights
