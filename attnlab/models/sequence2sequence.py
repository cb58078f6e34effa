"""The interface of sequence-to-sequence models, and its implementations: a recurrent one and a Transformer."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attnlab.configs import RecurrentConfig, TranslatorConfig
from attnlab.models.maps import apply_with_attention_maps, attention_maps, dropout_kwargs
from attnlab.models.recurrent import RecurrentSeq2Seq
from attnlab.models.transformer import TransformerSeq2Seq

Params = Any
DecodeState = Any
LogitsAndAux = tuple[Array, dict[str, Array]]
"""Logits [B, T, V], and `aux`: the auxiliary losses and statistics of the experts in each layer."""


@runtime_checkable
class Sequence2SequenceModel(Protocol):
    """A model that translates source tokens [B, S] into target tokens [B, T], with pure functions of its parameters."""

    @property
    def alignment_layer_index(self) -> int:
        """Index, from 0, of the decoder layer whose attention to the source is the alignment."""
        ...

    @property
    def alignment_shift(self) -> int:
        """Steps from the one that emits a token to the one whose attention is its alignment; 0: the same step."""
        ...

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens of source and of target; None: no limit."""
        ...

    @property
    def has_attention(self) -> bool:
        """Whether the decoder has attention to the source."""
        ...

    def init(self, rng: Array) -> Params:
        """Return initial parameters."""
        ...

    def forward(
        self, params: Params, source: Int[Array, 'B S'], inputs: Int[Array, 'B T'], rng: Array | None
    ) -> tuple[Float[Array, 'B T V'], dict[str, Array]]:
        """Return the logits for the decoder's inputs, and `aux` of the experts.

        rng: PRNG key of dropout; None: no dropout.
        """
        ...

    def forward_with_attention(
        self, params: Params, source: Int[Array, 'B S'], inputs: Int[Array, 'B T']
    ) -> tuple[Float[Array, 'B T V'], Float[Array, 'B L T S']]:
        """Return the logits, and the attention of each decoder layer to the source, averaged over heads."""
        ...

    def attention_maps(
        self, params: Params, source: Int[Array, 'B S'], inputs: Int[Array, 'B T']
    ) -> dict[str, Array]:
        """Return the weights of each attention of the model [B, L, N, T, S], by its name."""
        ...

    def init_state(self, params: Params, source: Int[Array, 'B S'], max_tokens: int) -> DecodeState:
        """Return the decoding state before the first of at most `max_tokens` target tokens."""
        ...

    def decode_step(
        self, params: Params, max_tokens: int, state: DecodeState, tokens: Int[Array, ' B']
    ) -> tuple[DecodeState, Float[Array, 'B V'], Float[Array, 'B S']]:
        """Return the next state, the logits, and the attention weights of the alignment layer.

        tokens: [B], the previous tokens.  max_tokens: as in `init_state`.
        """
        ...


@dataclasses.dataclass(frozen=True)
class RecurrentModel:
    """`RecurrentSeq2Seq` as a `Sequence2SequenceModel`; it has one attention layer, without heads."""

    module: RecurrentSeq2Seq
    alignment_layer_index: int = 0
    alignment_shift: int = 0
    max_length: int | None = None

    @property
    def has_attention(self) -> bool:
        """Whether the decoder has attention to the source."""
        return self.module.config.attention != 'none'

    def init(self, rng: Array) -> Params:
        """Return initial parameters."""
        tokens = jnp.ones((1, 2), jnp.int32)
        return self.module.init(rng, tokens, tokens)['params']

    def forward(self, params: Params, source: Array, inputs: Array, rng: Array | None) -> LogitsAndAux:
        """Return the logits, and an empty `aux`."""
        output: Any = self.module.apply({'params': params}, source, inputs, **dropout_kwargs(rng))
        return output[0], {}

    def forward_with_attention(self, params: Params, source: Array, inputs: Array) -> tuple[Array, Array]:
        """Return the logits, and the attention weights [B, 1, T, S]."""
        logits, weights = self.module.apply({'params': params}, source, inputs)
        return logits, jnp.expand_dims(jnp.asarray(weights), 1)

    def attention_maps(self, params: Params, source: Array, inputs: Array) -> dict[str, Array]:
        """Return the attention weights [B, 1, 1, T, S] by name; {} without attention."""
        weights = self.forward_with_attention(params, source, inputs)[1]
        return {'decoder/cross_attention': weights[:, :, None]} if weights.size else {}

    def init_state(self, params: Params, source: Array, max_tokens: int) -> DecodeState:
        """Return the first decoder state and the encoded source."""
        return self.module.apply({'params': params}, source, method='encode')

    def decode_step(
        self, params: Params, max_tokens: int, state: DecodeState, tokens: Array
    ) -> tuple[DecodeState, Array, Array]:
        """Return the next state, the logits and the attention weights."""
        decoder_state, memory = state
        output: Any = self.module.apply({'params': params}, decoder_state, memory, tokens, method='decode')
        decoder_state, logits, weights = output
        return (decoder_state, memory), logits, weights


@dataclasses.dataclass(frozen=True)
class TransformerModel:
    """`TransformerSeq2Seq` as a `Sequence2SequenceModel`.

    Its decoding state is a dict of the source, its encoder states (`memory`) and the `cache`.
    """

    module: TransformerSeq2Seq
    has_attention: bool = True

    @property
    def alignment_layer_index(self) -> int:
        """Index, from 0, of the decoder layer whose attention to the source is the alignment."""
        return self.module.config.alignment_layer - 1

    @property
    def alignment_shift(self) -> int:
        """Steps from the one that emits a token to the one whose attention is its alignment; 0: the same step."""
        return self.module.config.alignment_shift

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens of source and of target; None: no limit."""
        return self.module.encoding.max_length

    def init(self, rng: Array) -> Params:
        """Return initial parameters."""
        tokens = jnp.ones((1, 2), jnp.int32)
        return self.module.init(rng, tokens, tokens)['params']

    def forward(self, params: Params, source: Array, inputs: Array, rng: Array | None) -> LogitsAndAux:
        """Return the logits, and `aux` of the experts."""
        output: Any = self.module.apply({'params': params}, source, inputs, **dropout_kwargs(rng))
        return output

    def forward_with_attention(self, params: Params, source: Array, inputs: Array) -> tuple[Array, Array]:
        """Return the logits, and the attention of each decoder layer to the source [B, L, T, S], the mean of heads."""
        (logits, _), maps = apply_with_attention_maps(self.module, params, source, inputs)
        return logits, jnp.mean(maps['decoder/cross_attention'], axis=2)

    def attention_maps(self, params: Params, source: Array, inputs: Array) -> dict[str, Array]:
        """Return the weights of each attention of the model [B, L, N, T, S], by its name."""
        return apply_with_attention_maps(self.module, params, source, inputs)[1]

    def init_state(self, params: Params, source: Array, max_tokens: int) -> DecodeState:
        """Return the state with the encoded source and an empty cache of `max_tokens` tokens."""
        memory, _ = self.module.apply({'params': params}, source, method='encode')
        no_tokens = jnp.zeros((source.shape[0], 0), jnp.int32)
        _, changed = self._cached_decode(max_tokens)({'params': params}, source, memory, no_tokens)
        return {'source': source, 'memory': memory, 'cache': changed['cache']}

    def decode_step(
        self, params: Params, max_tokens: int, state: DecodeState, tokens: Array
    ) -> tuple[DecodeState, Array, Array]:
        """Return the next state, the logits and the attention weights of the alignment layer."""
        variables = {'params': params, 'cache': state['cache']}
        decode = self._cached_decode(max_tokens)
        (x, _), changed = decode(variables, state['source'], state['memory'], tokens[:, None])
        logits: Any = self.module.apply({'params': params}, x[:, 0], method='logits')
        maps = attention_maps(changed['intermediates'])['decoder/cross_attention']
        weights = maps[:, self.alignment_layer_index, :, 0]
        return state | {'cache': changed['cache']}, logits, jnp.mean(weights, axis=1)

    def _cached_decode(self, max_tokens: int) -> Callable[..., Any]:
        """Return `TransformerSeq2Seq.decode` with a cache of `max_tokens` tokens."""
        cached_module = self.module.clone(cache_length=max_tokens)
        return partial(cached_module.apply, mutable=['cache', 'intermediates'], method='decode')


def make_sequence2sequence_model(
    config: RecurrentConfig | TranslatorConfig, source_vocabulary: int, target_vocabulary: int
) -> Sequence2SequenceModel:
    """Return the model of a config for vocabularies of the given sizes."""
    if isinstance(config, RecurrentConfig):
        return RecurrentModel(RecurrentSeq2Seq(source_vocabulary, target_vocabulary, config))
    return TransformerModel(TransformerSeq2Seq(source_vocabulary, target_vocabulary, config))
