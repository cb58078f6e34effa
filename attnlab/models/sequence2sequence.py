"""The interface of sequence-to-sequence models, and its two implementations over the Flax modules."""

import dataclasses
from collections.abc import Callable
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
"""Logits, and `aux` of the experts of each layer."""


@runtime_checkable
class Sequence2SequenceModel(Protocol):
    """A model that translates source tokens [B, S] into target tokens [B, T], as pure functions of its parameters."""

    @property
    def layer(self) -> int:
        """The decoder layer, from 0, whose attention to the source is the alignment."""
        ...

    @property
    def shift(self) -> int:
        """The number of steps after a word is made at which its alignment is read."""
        ...

    @property
    def longest(self) -> int | None:
        """The most tokens that either side may have; None: no limit."""
        ...

    @property
    def attends(self) -> bool:
        """Whether the decoder has attention to the source."""
        ...

    def init(self, rng: Array) -> Params: ...

    def forward(
        self, params: Params, source: Int[Array, 'B S'], inputs: Int[Array, 'B T'], rng: Array | None
    ) -> tuple[Float[Array, 'B T V'], dict[str, Array]]:
        """Logits for the decoder's inputs, and `aux` of the experts; without dropout if the key is None."""
        ...

    def read(
        self, params: Params, source: Int[Array, 'B S'], inputs: Int[Array, 'B T']
    ) -> tuple[Float[Array, 'B T V'], Float[Array, 'B L T S']]:
        """Logits, and the attention of each decoder layer to the source, as the mean of its heads."""
        ...

    def maps(self, params: Params, source: Int[Array, 'B S'], inputs: Int[Array, 'B T']) -> dict[str, Array]:
        """Every attention of the model by its name, [B, L, N, T, S]."""
        ...

    def start(self, params: Params, source: Int[Array, 'B S'], max_tokens: int) -> DecodeState:
        """The state before the first of at most `max_tokens` target tokens."""
        ...

    def step(
        self, params: Params, max_tokens: int, state: DecodeState, tokens: Int[Array, ' B']
    ) -> tuple[DecodeState, Float[Array, 'B V'], Float[Array, 'B S']]:
        """From the previous tokens: the next state, logits, and the attention of `layer`."""
        ...


@dataclasses.dataclass(frozen=True)
class RecurrentModel:
    """`RecurrentSeq2Seq` as a `Sequence2SequenceModel`; it has one attention, without heads."""

    module: RecurrentSeq2Seq
    layer: int = 0
    shift: int = 0
    longest: int | None = None

    @property
    def attends(self) -> bool:
        return self.module.config.attention != 'none'

    def init(self, rng: Array) -> Params:
        tokens = jnp.ones((1, 2), jnp.int32)
        return self.module.init(rng, tokens, tokens)['params']

    def forward(self, params: Params, source: Array, inputs: Array, rng: Array | None) -> LogitsAndAux:
        output: Any = self.module.apply({'params': params}, source, inputs, **dropout_kwargs(rng))
        return output[0], {}

    def read(self, params: Params, source: Array, inputs: Array) -> tuple[Array, Array]:
        logits, weights = self.module.apply({'params': params}, source, inputs)
        return logits, jnp.expand_dims(jnp.asarray(weights), 1)

    def maps(self, params: Params, source: Array, inputs: Array) -> dict[str, Array]:
        weights = self.read(params, source, inputs)[1]
        return {'decoder/cross_attention': weights[:, :, None]} if weights.size else {}

    def start(self, params: Params, source: Array, max_tokens: int) -> DecodeState:
        return self.module.apply({'params': params}, source, method='encode')

    def step(
        self, params: Params, max_tokens: int, state: DecodeState, tokens: Array
    ) -> tuple[DecodeState, Array, Array]:
        inner, memory = state
        output: Any = self.module.apply({'params': params}, inner, memory, tokens, method='decode')
        inner, logits, weights = output
        return (inner, memory), logits, weights


@dataclasses.dataclass(frozen=True)
class TransformerModel:
    """`TransformerSeq2Seq` as a `Sequence2SequenceModel`, whose state is the source, its encoding and the cache."""

    module: TransformerSeq2Seq
    attends: bool = True

    @property
    def layer(self) -> int:
        return self.module.config.alignment_layer - 1

    @property
    def shift(self) -> int:
        return self.module.config.alignment_shift

    @property
    def longest(self) -> int | None:
        return self.module.encoding.longest

    def init(self, rng: Array) -> Params:
        tokens = jnp.ones((1, 2), jnp.int32)
        return self.module.init(rng, tokens, tokens)['params']

    def forward(self, params: Params, source: Array, inputs: Array, rng: Array | None) -> LogitsAndAux:
        output: Any = self.module.apply({'params': params}, source, inputs, **dropout_kwargs(rng))
        return output

    def read(self, params: Params, source: Array, inputs: Array) -> tuple[Array, Array]:
        (logits, _), maps = apply_with_attention_maps(self.module, params, source, inputs)
        return logits, jnp.mean(maps['decoder/cross_attention'], axis=2)

    def maps(self, params: Params, source: Array, inputs: Array) -> dict[str, Array]:
        return apply_with_attention_maps(self.module, params, source, inputs)[1]

    def start(self, params: Params, source: Array, max_tokens: int) -> DecodeState:
        memory, _ = self.module.apply({'params': params}, source, method='encode')
        no_tokens = jnp.zeros((source.shape[0], 0), jnp.int32)
        _, changed = self._decoder(max_tokens)({'params': params}, source, memory, no_tokens)
        return {'source': source, 'memory': memory, 'cache': changed['cache']}

    def step(
        self, params: Params, max_tokens: int, state: DecodeState, tokens: Array
    ) -> tuple[DecodeState, Array, Array]:
        variables = {'params': params, 'cache': state['cache']}
        (x, _), changed = self._decoder(max_tokens)(variables, state['source'], state['memory'], tokens[:, None])
        logits: Any = self.module.apply({'params': params}, x[:, 0], method='logits')
        weights = attention_maps(changed['intermediates'])['decoder/cross_attention'][:, self.layer, :, 0]
        return state | {'cache': changed['cache']}, logits, jnp.mean(weights, axis=1)

    def _decoder(self, max_tokens: int) -> Callable[..., Any]:
        """`TransformerSeq2Seq.decode` with a cache of so many tokens."""
        cached = self.module.clone(cache_length=max_tokens)
        mutable = ['cache', 'intermediates']
        return lambda variables, *args: cached.apply(variables, *args, mutable=mutable, method='decode')


def make_sequence2sequence_model(
    config: RecurrentConfig | TranslatorConfig, source_vocabulary: int, target_vocabulary: int
) -> Sequence2SequenceModel:
    """The model of a config for vocabularies of the given sizes."""
    if isinstance(config, RecurrentConfig):
        return RecurrentModel(RecurrentSeq2Seq(source_vocabulary, target_vocabulary, config))
    return TransformerModel(TransformerSeq2Seq(source_vocabulary, target_vocabulary, config))
