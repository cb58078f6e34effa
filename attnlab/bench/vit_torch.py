"""`VisionTransformer` as a PyTorch user writes it: a convolution for patches, the blocks of `lm_torch` without a mask.

The definition that the tests compare ours with, and the other side of `attnlab bench vit`.  Loading this module loads
PyTorch, which is an optional extra.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from attnlab.bench import lm_torch, torch_training

torch: Any = lm_torch.torch
nn, F = torch.nn, torch.nn.functional

Tensor = Any


class VisionTransformer(nn.Module):
    """`attnlab.models.vision.VisionTransformer` with learned positions and the mean of its tokens."""

    def __init__(
        self, side: int, patch: int, width: int, layers: int, heads: int, mlp_width: int, classes: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.zeros((side // patch) ** 2, width))
        block = lambda: lm_torch.Block(width, heads, 'gelu', mlp_width, causal=False)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """images [B, 3, side, side]: logits [B, classes]."""
        x = self.embedding(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def loss(model: VisionTransformer, images: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in nats, the mean over the batch."""
    return F.cross_entropy(model(images), labels)


def to_tensors(arrays: tuple[np.ndarray, ...]) -> tuple[Tensor, Tensor]:
    """Arrays (images [B, H, W, C], labels) as tensors, channels first."""
    images, labels = arrays
    return torch.from_numpy(images.transpose(0, 3, 1, 2).copy()), torch.from_numpy(labels).long()


def load_parameters(model: VisionTransformer, params: Mapping[str, Any]) -> None:
    """Gives `model` the parameters of our tree."""
    torch_training.load_state_dict(model, state_dict(params))


def state_dict(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Our tree (of parameters or of gradients) under PyTorch's names and in its layout."""
    stack, embedding = params['stack'], params['embedding']
    out = {'embedding.weight': np.transpose(embedding['kernel'], (3, 2, 0, 1)), 'embedding.bias': embedding['bias']}
    out |= {'positions': params['positions']['table'], **torch_training.linear_state_dict('head', params['head'])}
    out |= lm_torch.norm_state_dict('norm', stack['norm'])
    for layer in range(len(stack) - 1):
        block = lm_torch.block_state_dict(stack[f'block_{layer}'])
        out |= {f'blocks.{layer}.{name}': x for name, x in block.items()}
    return {name: np.asarray(x) for name, x in out.items()}
