"""The config fields of a Vision Transformer, and the model they make; sizes by name.

    config.model = vit.fields(**vit.SIZES['S'], name='vit', image=(224, 224), patch=(16, 16))

Nothing heavy is imported before a model is made, so experiments may import this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnlab.errors import UserError
from attnlab.tasks import transformer

if TYPE_CHECKING:
    from attnlab.models.vision import VisionTransformer

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


def check(model: Any) -> None:
    """Raises UserError for a value that no field can have; what does not fit together is the model's to say."""
    transformer.check_blocks(model)
    for name in ('image', 'patch'):
        check_size(model, name)
    if model.registers < 0:
        raise UserError(f'model.registers is {model.registers}; expected 0 or more')
    transformer.check_names(
        model, embedding=('product', 'convolution', 'tokenizer'), pool=('mean', 'class', 'attention'),
        positions=('learned', 'sinusoidal', 'rotary', 'none'),
    )  # fmt: skip
    transformer.check_depth(model, 'convolutions')
    if model.channels < 1:
        raise UserError(f'model.channels is {model.channels}; expected 1 or more')


def check_size(model: Any, name: str) -> None:
    """Raises UserError for what is no (height, width)."""
    if len(model[name]) != 2 or min(model[name]) < 1:
        raise UserError(f'model.{name} is {model[name]}; expected a height and a width of 1 or more')


def build(model: Any, classes: int) -> VisionTransformer:
    """The model of its fields."""
    import dataclasses

    from attnlab.models.vision import VisionTransformer

    recipe = dataclasses.replace(transformer.recipe(model), rotary=None)  # the model turns by row and column
    return VisionTransformer(
        classes, tuple(model.image), tuple(model.patch), model.width, model.layers, recipe, model.embedding,
        (model.channels,) * (model.convolutions - 1), model.positions, model.rotary_base, model.pool, model.registers,
        model.scan, model.remat,
    )  # fmt: skip
