"""`RecurrentSeq2Seq` as a PyTorch user writes it: packed sequences, fused layers where there is one, a loop elsewhere.

The definition that the tests compare ours with, and the other side of `attnlab bench seq2seq`.  Loading this module
loads PyTorch, which is an optional extra.
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
    """Weighted mean of the source states, scored by tanh network or scaled dot product."""

    def __init__(self, score: str, hidden: int, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(width, hidden, bias=False)
        self.vector = nn.Linear(hidden, 1, bias=False) if score == 'additive' else None

    def forward(self, state: Tensor, keys: Tensor, memory: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """state [B, D], keys [B, S, H], memory [B, S, C], mask [B, S]: context [B, C] and weights [B, S]."""
        query = self.query(state)
        if self.vector is None:
            logits = torch.bmm(keys, query[:, :, None])[..., 0] / query.shape[-1] ** 0.5
        else:
            logits = self.vector(torch.tanh(query[:, None] + keys))[..., 0]
        weights = torch.softmax(logits.masked_fill(~mask, -torch.inf), dim=-1)
        return torch.bmm(weights[:, None], memory)[:, 0], weights


class Seq2Seq(nn.Module):
    """The arguments and the equations of `attnlab.models.recurrent.RecurrentSeq2Seq`."""

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
        # Nothing is read between the steps of a fixed context, so one fused layer runs them all.
        if self.attend is None:
            self.decoder = layer(embedding + width, hidden, batch_first=True)
        else:
            self.decoder = one_step(embedding + width, hidden)
        self.read = nn.Linear(hidden + width + embedding, embedding)
        self.bias = nn.Parameter(torch.zeros(target_vocabulary))
        self.drop = nn.Dropout(dropout)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """source [B, S]: the states [B, S, C], zero on padding, and the last of each direction [B, C]."""
        B, S = source.shape
        lengths = (source != 0).sum(1)
        x, at = self.drop(self.embed_source(source)), torch.arange(S)[None]
        turned = torch.where(at < lengths[:, None], lengths[:, None] - 1 - at, at)[..., None]
        if self.reverse_source:
            x = torch.take_along_dim(x, turned, 1)
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        states, last = self.encoder(packed)
        states, _ = rnn.pad_packed_sequence(states, batch_first=True, total_length=S)
        if self.reverse_source:
            states = torch.take_along_dim(states, turned, 1)
        last = (last[0] if self.lstm else last)[-self.directions :].transpose(0, 1).reshape(B, -1)
        return states, last

    def forward(self, source: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """source [B, S], decoder inputs [B, T]: logits [B, T, V] and weights [B, T, S]."""
        memory, last = (self.drop(x) for x in self.encode(source))
        start, previous = torch.tanh(self.start(last)), self.drop(self.embed_target(inputs))
        if self.attend is None:
            outputs, contexts, weights = self._fixed(start, last, previous)
        else:
            outputs, contexts, weights = self._attending(start, memory, previous, source != 0)
        read = self.drop(torch.tanh(self.read(torch.cat([outputs, contexts, previous], -1))))
        return F.linear(read, self.embed_target.weight, self.bias), weights

    def _fixed(self, start: Tensor, last: Tensor, previous: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        contexts = last[:, None].expand(-1, previous.shape[1], -1)
        state = (start[None], start[None]) if self.lstm else start[None]
        outputs, _ = self.decoder(torch.cat([previous, contexts], -1), state)
        return outputs, contexts, previous.new_zeros(*previous.shape[:2], 0)

    def _attending(self, start: Tensor, memory: Tensor, previous: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        assert self.attend is not None
        keys, state, steps = self.attend.key(memory), (start, start) if self.lstm else start, []
        for x in previous.unbind(1):
            context, weights = self.attend(state[0] if self.lstm else state, keys, memory, mask)
            state = self.decoder(torch.cat([x, context], -1), state)
            steps.append((state[0] if self.lstm else state, context, weights))
        outputs, contexts, weights = (torch.stack(each, 1) for each in zip(*steps, strict=True))
        return outputs, contexts, weights


def loss(model: Seq2Seq, source: Tensor, inputs: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Label-smoothed cross-entropy, the mean over the labels that are not padding."""
    logits, _ = model(source, inputs)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0, label_smoothing=smoothing)


def to_tensors(arrays: tuple[np.ndarray, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Arrays (source, inputs, labels) as tensors."""
    source, inputs, labels = (torch.from_numpy(x).long() for x in arrays)
    return source, inputs, labels


def load_parameters(model: Seq2Seq, params: Mapping[str, Any]) -> None:
    """Gives `model` the parameters of our tree."""
    torch_training.load_state_dict(model, state_dict(params, model.reverse_source))


def state_dict(params: Mapping[str, Any], reverse_source: bool) -> dict[str, np.ndarray]:
    """Our tree (of parameters or of gradients) under PyTorch's names and in its layout.

    PyTorch's first direction is the one that it reads the source in: our backward one where the source is reversed.
    Its LSTM has two biases where one is enough; `bias_ih` is zero here.
    """
    out = {f'embed_{side}.weight': params[f'embed_{side}']['embedding'] for side in ('source', 'target')}
    out |= (
        {'bias': params['bias']}
        | linear_state_dict('start', params['start'])
        | linear_state_dict('read', params['read'])
    )
    out |= _encoder(params['encoder'], 'backward' if reverse_source else 'forward')
    step = params['step']
    suffix = '' if 'attend' in step else '_l0'
    out |= {f'decoder.{name}{suffix}': x for name, x in _cell(step['recurrence']).items()}
    if 'attend' in step:
        attend = step['attend']
        out |= linear_state_dict('attend.query', attend['query']) | linear_state_dict('attend.key', attend['key'])
        out |= {'attend.vector.weight': attend['vector'].T} if 'vector' in attend else {}
    return {name: np.asarray(x) for name, x in out.items()}


def _encoder(params: Mapping[str, Any], first: str) -> dict[str, Any]:
    out = {}
    for name, run in params.items():
        way, layer = name.split('_')
        suffix = f'_l{layer}' if way == first else f'_l{layer}_reverse'
        out |= {f'encoder.{weight}{suffix}': x for weight, x in _cell(run['cell']).items()}
    return out


def _cell(params: Mapping[str, Any]) -> dict[str, Any]:
    if 'gru' in params:  # r, z, n in both
        x, h = params['gru']['input'], params['gru']['hidden']
        return {'weight_ih': x['kernel'].T, 'weight_hh': h['kernel'].T, 'bias_ih': x['bias'], 'bias_hh': h['bias']}
    x, h = ([params['lstm'][side + gate] for gate in 'ifgo'] for side in 'ih')
    bias = np.concatenate([gate['bias'] for gate in h])
    kernels = (np.concatenate([gate['kernel'] for gate in side], axis=1).T for side in (x, h))
    return dict(zip(('weight_ih', 'weight_hh'), kernels, strict=True)) | {'bias_ih': 0 * bias, 'bias_hh': bias}
