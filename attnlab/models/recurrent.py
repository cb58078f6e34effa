"""Sequence to sequence with recurrence: a fixed context, or attention over the source."""

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
    """The encoded source sentences of a batch, as the decoder reads them.

    memory: [B, S, C] the encoder's states, or [B, C] its last one where the context is fixed.
    keys: [B, S, H] their part of the attention score; None where the context is fixed.  lengths: [B].
    """

    memory: Float[Array, 'B S C'] | Float[Array, 'B C']
    keys: Float[Array, 'B S H'] | None
    lengths: Int[Array, ' B']


class DecoderStep(nn.Module):
    """c_t from s_{t-1}, then s_t = g(y_{t-1}, s_{t-1}, c_t); without attention c_t is the same at every step."""

    config: RecurrentConfig

    def setup(self) -> None:
        config = self.config
        self.recurrence = RecurrentCell(config.cell, config.hidden, config.original)
        if config.attention != 'none':
            self.attend = SourceAttention(config.attention, config.hidden, use_bias=not config.original)

    def prepare(
        self, states: Float[Array, 'B S C'], last: Float[Array, 'B C'], lengths: Int[Array, ' B']
    ) -> EncodedSource:
        """The part that is computed once a sentence."""
        if self.config.attention == 'none':
            return EncodedSource(last, None, lengths)
        return EncodedSource(states, self.attend.project_keys(states), lengths)

    def __call__(
        self, state: CellState, source: EncodedSource, previous: Float[Array, 'B E']
    ) -> tuple[CellState, tuple[Float[Array, 'B D'], Float[Array, 'B C'], Float[Array, 'B S']]]:
        """State and embedded previous token [B, E]: the next state, and s_t, c_t and weights for the logits.

        The original makes them from s_{t-1}.
        """
        if source.keys is None:
            context, weights = source.memory, jnp.zeros((previous.shape[0], 0), previous.dtype)
        else:
            context, weights = self.attend(cell_output(state), source.keys, source.memory, source.lengths)
        after = self.recurrence(state, jnp.concatenate([previous, context], axis=-1))
        return after, (cell_output(state if self.config.original else after), context, weights)


class RecurrentSeq2Seq(nn.Module):
    """Encoder-decoder of Cho et al. 2014 (`attention='none'`) and Bahdanau et al. 2015.

    Token 0 is padding everywhere.  A source is [tokens, EOS], a decoder input [BOS, tokens].
    original: as in appendix A of Bahdanau et al. 2015, a GRU with additive attention or none.  No biases; the decoder
      starts from the backward state alone; a word is read off s_{t-1}, c_t and y_{t-1} through a maxout layer of
      hidden / 2 units and an output matrix of its own, where ours reads s_t through a tanh layer and the embedding.
    """

    source_vocabulary: int
    target_vocabulary: int
    config: RecurrentConfig

    def setup(self) -> None:
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
        """Source tokens [B, S]: the decoder's first state, and the encoded source."""
        lengths = jnp.sum(source != 0, axis=1)
        embedded = self.drop(self.embed_source(source), deterministic=deterministic)
        states, last = self.encoder(embedded, length_mask(lengths, source.shape[1]), deterministic)
        states, last = (self.drop(x, deterministic=deterministic) for x in (states, last))
        config = self.config
        first = last[:, -config.hidden :] if config.original else last  # of two directions the backward one comes last
        return state_from_output(config.cell, jnp.tanh(self.start(first))), self.step.prepare(states, last, lengths)

    def logits(
        self,
        state: Float[Array, '*B D'],
        context: Float[Array, '*B C'],
        previous: Float[Array, '*B E'],
        deterministic: bool,
    ) -> Float[Array, '*B V']:
        """From the state, c_t and y_{t-1} through one layer to the vocabulary."""
        read = self.read(jnp.concatenate([state, context, previous], axis=-1))
        if self.config.original:
            read = jnp.max(read.reshape(*read.shape[:-1], -1, 2), axis=-1)
        else:
            read = jnp.tanh(read)
        # One product over flat rows: with the batch and time axes apart the CPU takes twice the time.
        rows = self.drop(read, deterministic=deterministic).reshape(-1, read.shape[-1])
        logits = self.output(rows) if self.config.original else self.embed_target.attend(rows) + self.bias[None]
        return logits.reshape(*read.shape[:-1], -1)

    def decode(
        self, state: CellState, source: EncodedSource, tokens: Int[Array, ' B']
    ) -> tuple[CellState, Float[Array, 'B V'], Float[Array, 'B S']]:
        """One step of decoding: the previous tokens [B] give the next state, logits [B, V] and attention [B, S]."""
        previous = self.embed_target(tokens)
        state, (output, context, weights) = self.step(state, source, previous)
        return state, self.logits(output, context, previous, True), weights

    def __call__(
        self, source: Int[Array, 'B S'], inputs: Int[Array, 'B T'], deterministic: bool = True
    ) -> tuple[Float[Array, 'B T V'], Float[Array, 'B T keys']]:
        """Teacher forcing: source [B, S] and decoder inputs [B, T] give logits [B, T, V] and attention [B, T, S].

        Row t of the attention is read while token t of the output is made; it is [B, T, 0] if the context is fixed.
        """
        state, memory = self.encode(source, deterministic)
        previous = self.drop(self.embed_target(inputs), deterministic=deterministic)
        scan = nn.scan(
            lambda step, state, previous: step(state, memory, previous),
            variable_broadcast='params', split_rngs={'params': False}, in_axes=1, out_axes=1,
            check_constancy_invariants=self.is_initializing(),  # as in `attnlab.layers.recurrent`
        )  # fmt: skip
        state = mesh_axes.match_varying_axes(
            state, memory, previous, self.variables
        )  # as its steps make it inside of jax.shard_map
        _, (states, contexts, weights) = scan(self.step, state, previous)
        return self.logits(states, contexts, previous, deterministic), weights
