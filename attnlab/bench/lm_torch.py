"""The language model as a PyTorch user writes it: one product for queries, keys and values, and fused attention.

The tests compare attnlab's model with this one, and `attnlab bench lm` times both.  Importing this module imports
PyTorch, which is an optional extra.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from attnlab.bench import torch_training
from attnlab.bench.torch_training import linear_state_dict

torch: Any = torch_training.import_torch()
nn, F = torch.nn, torch.nn.functional

Tensor = Any
GELU_APPROXIMATION = {'gelu': 'none', 'gelu_tanh': 'tanh'}
"""Value of `BlockConfig.mlp` -> argument of `nn.GELU`."""


class Block(nn.Module):
    """A pre-norm Transformer block: attention, then an MLP of two layers with GELU, each with a residual connection."""

    def __init__(self, width: int, heads: int, mlp: str, mlp_width: int | None = None, causal: bool = True) -> None:
        super().__init__()
        hidden = mlp_width or 4 * width
        self.heads, self.causal = heads, causal
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = (
            nn.Linear(width, hidden),
            nn.GELU(GELU_APPROXIMATION[mlp]),
            nn.Linear(hidden, width),
        )

    def forward(self, x: Tensor, cache: Tensor | None = None, at: int = 0) -> Tensor:
        """Return the output [B, T, D] for x [B, T, D].

        cache: [2, B, N, context, H], keys and values, filled in place.  at: position of the first token of x.
        """
        B, T, D = x.shape
        split = self.qkv(self.attention_norm(x)).view(B, T, 3, self.heads, D // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        if cache is not None:
            cache[0, :, :, at : at + T], cache[1, :, :, at : at + T] = key, value
            key, value = cache[:, :, :, : at + T]
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal and T > 1)
        x = x + self.out(attended.transpose(1, 2).reshape(B, T, D))
        return x + self.down(self.act(self.up(self.mlp_norm(x))))


class LanguageModel(nn.Module):
    """`attnlab.models.language.LanguageModel` with learned positions, tied embeddings and no dropout."""

    def __init__(self, vocabulary: int, width: int, layers: int, context: int, heads: int, mlp: str = 'gelu') -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, mlp) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.cache_shape = (layers, 2, heads, context, width // heads)

    def forward(self, tokens: Tensor, cache: Tensor | None = None, at: int = 0) -> Tensor:
        """Return the logits [B, T, V] for tokens [B, T]; with a cache, those of the last token only, [B, 1, V].

        cache: [L, 2, B, N, context, H], filled in place.  at: number of positions in the cache; if not 0, T must be 1.
        """
        x = self.embedding(tokens) + self.positions.weight[at : at + tokens.shape[1]]
        for layer, block in enumerate(self.blocks):
            x = block(x, None if cache is None else cache[layer], at)
        return F.linear(self.norm(x if cache is None else x[:, -1:]), self.embedding.weight)

    def start(self, batch: int) -> Tensor:
        """Return an empty cache for `batch` rows, [L, 2, B, N, context, H]."""
        layers, keys_and_values, heads, context, width = self.cache_shape
        return self.norm.weight.new_zeros(layers, keys_and_values, batch, heads, context, width)


def loss(model: LanguageModel, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy over all labels, in nats."""
    return F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())


def generate_greedily(model: LanguageModel, prompt: np.ndarray, count: int) -> np.ndarray:
    """Return `count` tokens [B, count] after a prompt [B, P], decoded greedily with a cache."""
    tokens, chosen = torch.from_numpy(prompt).long(), []
    with torch.inference_mode():
        cache, at = model.init_state(len(prompt)), 0
        for _ in range(count):
            logits = model(tokens, cache, at)
            at += tokens.shape[1]
            tokens = logits[:, -1].argmax(-1, keepdim=True)
            chosen.append(tokens)
        return torch.cat(chosen, 1).numpy()


def load_parameters(model: LanguageModel, params: Mapping[str, Any]) -> None:
    """Copy parameters of attnlab's model into a PyTorch model."""
    torch_training.load_state_dict(model, state_dict(params))


def state_dict(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return a tree of attnlab's model, parameters or gradients, with the names and layout of the PyTorch model."""
    stack, table = params['stack'], params['place']['positions']['table']
    out = {'embedding.weight': params['embedding']['embedding'], 'positions.weight': table}
    out |= norm_state_dict('norm', stack['norm'])
    for layer in range(len(stack) - 1):
        out |= {f'blocks.{layer}.{name}': x for name, x in block_state_dict(stack[f'block_{layer}']).items()}
    return {name: np.asarray(x) for name, x in out.items()}


def block_state_dict(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `state_dict` of one block."""
    attention, mlp = params['attention'], params['mlp']
    parts = [attention[name] for name in ('query', 'key', 'value')]
    D = parts[0]['kernel'].shape[0]
    qkv = {
        'kernel': np.concatenate([part['kernel'].reshape(D, -1) for part in parts], axis=1),
        'bias': np.concatenate([part['bias'].reshape(-1) for part in parts]),
    }
    out = {'kernel': attention['out']['kernel'].reshape(-1, D), 'bias': attention['out']['bias']}
    products = (
        linear_state_dict('qkv', qkv)
        | linear_state_dict('out', out)
        | linear_state_dict('up', mlp['up'])
        | linear_state_dict('down', mlp['down'])
    )
    return (
        products
        | norm_state_dict('attention_norm', params['attention_norm'])
        | norm_state_dict('mlp_norm', params['mlp_norm'])
    )


def norm_state_dict(name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `state_dict` of one norm."""
    return {f'{name}.weight': params['scale'], f'{name}.bias': params['bias']}


def to_tensors(arrays: tuple[np.ndarray, ...]) -> tuple[Tensor, Tensor]:
    """Return arrays (inputs, labels) as tensors."""
    inputs, labels = (torch.from_numpy(np.ascontiguousarray(x)).long() for x in arrays)
    return inputs, labels
