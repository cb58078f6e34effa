"""The config fields of a Vision Transformer, and sizes by name.

    config.model = vit.fields(**vit.SIZES['S'], name='vit', image=(224, 224), patch=(16, 16))

Nothing heavy is imported with it, so experiments may import this module.
"""

from __future__ import annotations

from typing import Any

from attnlab.tasks import transformer

FIELDS: dict[str, Any] = transformer.BLOCKS | dict(
    image=(32, 32),  # height and width that the model sees; images of another size are resized
    patch=(4, 4),  # height and width of a token
    embedding='product',  # of patches: product, convolution (the same numbers); tokenizer: convolutions, no patches
    convolutions=2,  # of the tokenizer
    channels=64,  # of those before the last
    positions='learned',  # learned, sinusoidal, rotary (both 2-D), none
    rotary_base=100.0,
    pool='mean',  # mean, class, attention
    registers=0,  # tokens of no place
)

SIZES: dict[str, dict[str, Any]] = {
    'Ti': dict(layers=12, width=192, heads=3),  # Touvron et al. 2021
    'S': dict(layers=12, width=384, heads=6),
    'B': dict(layers=12, width=768, heads=12),  # Dosovitskiy et al. 2021, table 1
    'L': dict(layers=24, width=1024, heads=16),
    'H': dict(layers=32, width=1280, heads=16),
    'CIFAR-S': dict(layers=6, width=256, heads=4),  # for images of 32 x 32
    'CIFAR-Ti': dict(layers=4, width=96, heads=3),
}


def fields(**changes: Any) -> dict[str, Any]:
    """All fields of a Vision Transformer, with some changed or, such as `name`, added."""
    return {**FIELDS, **changes}
