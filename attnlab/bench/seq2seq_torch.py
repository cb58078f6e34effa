"""The recurrent sequence-to-sequence model as a PyTorch user writes it, with packed sequences and fused layers.

The decoder is a Python loop if it has attention.  The tests compare attnlab's model with this one, and
`attnlab bench seq2seq` times both.  Importing this module imports PyTorch, which is an optional extra.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from attnlab.bench import torch_training
from attnlab.bench.torch_training import linear_state_dict

torch: Any = torch_training.import_torch()
nn, F = torch.nn, torch.nn.functional
rnn = torch.nn.utils.rnn

Tensor = Any


class SourceAttention(nn.Module):
    """Attention over the source states, with additive or scaled dot-product scores."""

    def __init__(self, score: str, hidden: int, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(width, hidden, bias=False)
        self.vector = nn.Linear(hidden, 1, bias=False) if score == 'additive' else None

    def forward(self, state: Tensor, keys: Tensor, memory: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the context [B, C] and the weights [B, S].

        state: [B, D].  keys: [B, S, H].  memory: [B, S, C].  mask: [B, S], True at tokens.
        """
        query = self.query(state)
        if self.vector is None:
            logits = torch.bmm(keys, query[:, :, None])[..., 0] / query.shape[-1] ** 0.5
        else:
            logits = self.vector(torch.tanh(query[:, None] + keys))[..., 0]
        weights = torch.softmax(logits.masked_fill(~mask, -torch.inf), dim=-1)
        return torch.bmm(weights[:, None], memory)[:, 0], weights


class Seq2Seq(nn.Module):
    """The same model as `attnlab.models.recurrent.RecurrentSeq2Seq`, with the same arguments."""

    def __init__(
        self,
        source_vocabulary: int,
        target_vocabulary: int,
        cell: str,
        embedding: int,
        hidden: int,
        encoder_layers: int,
        bidirectional: bool,
        reverse_source: bool,
        attention: str,
        dropout: float,
    ) -> None:
        super().__init__()
        layer, one_step = {'gru': (nn.GRU, nn.GRUCell), 'lstm': (nn.LSTM, nn.LSTMCell)}[cell]
        self.directions = 1 + bidirectional
        width = hidden * self.directions
        self.reverse_source, self.lstm = reverse_source, cell == 'lstm'
        self.embed_source = nn.Embedding(source_vocabulary, embedding)
        self.embed_target = nn.Embedding(target_vocabulary, embedding)
        self.encoder = layer(
            embedding, hidden, encoder_layers, bidirectional=bidirectional, batch_first=True,
            dropout=dropout if encoder_layers > 1 else 0.0,
        )  # fmt: skip
        self.start = nn.Linear(width, hidden)
        self.attend = None if attention == 'none' else SourceAttention(attention, hidden, width)
        # With a fixed context, no step depends on attention, so one fused layer runs all steps.
        if self.attend is None:
            self.decoder = layer(embedding + width, hidden, batch_first=True)
        else:
            self.decoder = one_step(embedding + width, hidden)
        self.read = nn.Linear(hidden + width + embedding, embedding)
        self.bias = nn.Parameter(torch.zeros(target_vocabulary))
        self.drop = nn.Dropout(dropout)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states [B, S, C], zero at padding, and the last states [B, C] of a source [B, S]."""
        B, S = source.shape
        lengths = (source != 0).sum(1)
        x, position = self.drop(self.embed_source(source)), torch.arange(S)[None]
        reversed_position = torch.where(position < lengths[:, None], lengths[:, None] - 1 - position, position)
        index = reversed_position[..., None]
        if self.reverse_source:
            x = torch.take_along_dim(x, index, 1)
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        states, last = self.encoder(packed)
        states, _ = rnn.pad_packed_sequence(states, batch_first=True, total_length=S)
        if self.reverse_source:
            states = torch.take_along_dim(states, index, 1)
        last = (last[0] if self.lstm else last)[-self.directions :].transpose(0, 1).reshape(B, -1)
        return states, last

    def forward(self, source: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [B, T, V] and weights [B, T, S], for source [B, S] and decoder inputs [B, T]."""
        memory, last = (self.drop(x) for x in self.encode(source))
        start, previous = torch.tanh(self.start(last)), self.drop(self.embed_target(inputs))
        if self.attend is None:
            outputs, contexts, weights = self._decode_fixed_context(start, last, previous)
        else:
            outputs, contexts, weights = self._decode_with_attention(start, memory, previous, source != 0)
        read = self.drop(torch.tanh(self.read(torch.cat([outputs, contexts, previous], -1))))
        return F.linear(read, self.embed_target.weight, self.bias), weights

    def _decode_fixed_context(self, start: Tensor, last: Tensor, previous: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        contexts = last[:, None].expand(-1, previous.shape[1], -1)
        state = (start[None], start[None]) if self.lstm else start[None]
        outputs, _ = self.decoder(torch.cat([previous, contexts], -1), state)
        return outputs, contexts, previous.new_zeros(*previous.shape[:2], 0)

    def _decode_with_attention(
        self, start: Tensor, memory: Tensor, previous: Tensor, mask: Tensor
    ) -> tuple[Tensor, ...]:
        assert self.attend is not None
        keys, state, steps = self.attend.key(memory), (start, start) if self.lstm else start, []
        for x in previous.unbind(1):
            context, weights = self.attend(state[0] if self.lstm else state, keys, memory, mask)
            state = self.decoder(torch.cat([x, context], -1), state)
            steps.append((state[0] if self.lstm else state, context, weights))
        outputs, contexts, weights = (torch.stack(values, 1) for values in zip(*steps, strict=True))
        return outputs, contexts, weights


def loss(model: Seq2Seq, source: Tensor, inputs: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Return the mean label-smoothed cross-entropy over the labels that are not padding."""
    logits, _ = model(source, inputs)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0, label_smoothing=smoothing)


def to_tensors(arrays: tuple[np.ndarray, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return arrays (source, inputs, labels) as tensors."""
    source, inputs, labels = (torch.from_numpy(x).long() for x in arrays)
    return source, inputs, labels


def load_parameters(model: Seq2Seq, params: Mapping[str, Any]) -> None:
    """Copy parameters of attnlab's model into a PyTorch model."""
    torch_training.load_state_dict(model, state_dict(params, model.reverse_source))


def state_dict(params: Mapping[str, Any], reverse_source: bool) -> dict[str, np.ndarray]:
    """Return a tree of attnlab's model, parameters or gradients, with the names and layout of the PyTorch model.

    The first direction of PyTorch's encoder is the one in which it reads the source.  If the source is reversed, this
    is attnlab's backward direction.  PyTorch's LSTM has two biases of which one is redundant: `bias_ih` is zero here.
    """
    out = {f'embed_{side}.weight': params[f'embed_{side}']['embedding'] for side in ('source', 'target')}
    out |= (
        {'bias': params['bias']}
        | linear_state_dict('start', params['start'])
        | linear_state_dict('read', params['read'])
    )
    out |= _encoder_state_dict(params['encoder'], 'backward' if reverse_source else 'forward')
    step = params['step']
    suffix = '' if 'attend' in step else '_l0'
    out |= {f'decoder.{name}{suffix}': x for name, x in _cell_state_dict(step['recurrence']).items()}
    if 'attend' in step:
        attend = step['attend']
        out |= linear_state_dict('attend.query', attend['query']) | linear_state_dict('attend.key', attend['key'])
        out |= {'attend.vector.weight': attend['vector'].T} if 'vector' in attend else {}
    return {name: np.asarray(x) for name, x in out.items()}


def _encoder_state_dict(params: Mapping[str, Any], first: str) -> dict[str, Any]:
    out = {}
    for name, layer_params in params.items():
        direction, layer = name.split('_')
        suffix = f'_l{layer}' if direction == first else f'_l{layer}_reverse'
        cell = _cell_state_dict(layer_params['cell'])
        out |= {f'encoder.{weight}{suffix}': x for weight, x in cell.items()}
    return out


def _cell_state_dict(params: Mapping[str, Any]) -> dict[str, Any]:
    if 'gru' in params:  # both frameworks order the gates r, z, n
        x, h = params['gru']['input'], params['gru']['hidden']
        return {'weight_ih': x['kernel'].T, 'weight_hh': h['kernel'].T, 'bias_ih': x['bias'], 'bias_hh': h['bias']}
    x, h = ([params['lstm'][side + gate] for gate in 'ifgo'] for side in 'ih')
    bias = np.concatenate([gate['bias'] for gate in h])
    kernels = (np.concatenate([gate['kernel'] for gate in side], axis=1).T for side in (x, h))
    return dict(zip(('weight_ih', 'weight_hh'), kernels, strict=True)) | {'bias_ih': 0 * bias, 'bias_hh': bias}
