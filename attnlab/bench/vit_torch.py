"""The Vision Transformer as a PyTorch user writes it: a convolution for patches, blocks of `lm_torch` without a mask.

The tests compare attnlab's model with this one, and `attnlab bench vit` times both.  Importing this module imports
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
    """`attnlab.models.vision.VisionTransformer` with learned positions and mean pooling."""

    def __init__(
        self, side: int, patch: int, width: int, layers: int, heads: int, mlp_width: int, classes: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.zeros((side // patch) ** 2, width))
        blocks = (lm_torch.Block(width, heads, 'gelu', mlp_width, causal=False) for _ in range(layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits [B, classes] for images [B, 3, side, side]."""
        x = self.embedding(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def loss(model: VisionTransformer, images: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy over the batch, in nats."""
    return F.cross_entropy(model(images), labels)


def to_tensors(arrays: tuple[np.ndarray, ...]) -> tuple[Tensor, Tensor]:
    """Return arrays (images [B, H, W, C], labels [B]) as tensors, with channels first."""
    images, labels = arrays
    return torch.from_numpy(images.transpose(0, 3, 1, 2).copy()), torch.from_numpy(labels).long()


def load_parameters(model: VisionTransformer, params: Mapping[str, Any]) -> None:
    """Copy parameters of attnlab's model into a PyTorch model."""
    torch_training.load_state_dict(model, state_dict(params))


def state_dict(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return a tree of attnlab's model, parameters or gradients, with the names and layout of the PyTorch model."""
    stack, embedding = params['stack'], params['embedding']
    out = {'embedding.weight': np.transpose(embedding['kernel'], (3, 2, 0, 1)), 'embedding.bias': embedding['bias']}
    out |= {'positions': params['positions']['table'], **torch_training.linear_state_dict('head', params['head'])}
    out |= lm_torch.norm_state_dict('norm', stack['norm'])
    for layer in range(len(stack) - 1):
        block = lm_torch.block_state_dict(stack[f'block_{layer}'])
        out |= {f'blocks.{layer}.{name}': x for name, x in block.items()}
    return {name: np.asarray(x) for name, x in out.items()}
