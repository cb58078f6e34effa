"""Config fields of image classification."""

from dataclasses import dataclass
from typing import Any, Literal

from attnlab.configs.block import BlockConfig, check_depth
from attnlab.configs.fields import REQUIRED, Section, field
from attnlab.configs.run import RunConfig
from attnlab.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ImageData(Section):
    """Fields of every image set: augmentation of training images."""

    crop: int = field(0, 'pixels of padding before a random crop; 0: no crop', ge=0)
    flip: bool = field(False, 'random horizontal flips')
    policy: Literal['none', 'trivial', 'rand'] = field('none', 'TrivialAugment, RandAugment or none')
    operations: int = field(2, 'RandAugment operations for each image', ge=1)
    strength: float = field(0.5, 'strength of RandAugment operations', ge=0, le=1)
    erase: float = field(0.0, 'probability of random erasing', ge=0, le=1)
    mixup: float = field(0.0, 'alpha of the Beta distribution of mixup; 0: none', ge=0)
    cutmix: float = field(0.0, 'alpha of the Beta distribution of CutMix; 0: none', ge=0)


@dataclass(frozen=True, kw_only=True)
class Cifar10Data(ImageData):
    """CIFAR-10."""

    name: Literal['cifar10'] = field('cifar10', 'images')
    folder: str = field('', 'folder with the published files or archive; empty: $ATTNLAB_DATA/cifar10 or a download')
    held_out: int = field(1000, 'training images that are held out for validation', ge=1)


@dataclass(frozen=True, kw_only=True)
class Cifar100Data(ImageData):
    """CIFAR-100."""

    name: Literal['cifar100'] = field('cifar100', 'images')
    folder: str = field('', 'folder with the published files or archive; empty: $ATTNLAB_DATA/cifar100 or a download')
    held_out: int = field(1000, 'training images that are held out for validation', ge=1)


@dataclass(frozen=True, kw_only=True)
class DigitsData(ImageData):
    """Handwritten digits, drawn by a program."""

    name: Literal['digits'] = field('digits', 'images')
    train_examples: int = field(12_000, 'training images', ge=1)
    test_examples: int = field(1000, 'images of every other split', ge=1)


@dataclass(frozen=True, kw_only=True)
class ImageFiles(ImageData):
    """Images in .npz files: `images` [n, height, width, channels] uint8 and `labels` [n]."""

    name: Literal['files'] = field('files', 'images')
    train: str = field('', '.npz file with training images: --config.data.train=FILE')
    test: str = field('', '.npz file with test images')
    held_out: int = field(1000, 'training images that are held out for validation', ge=1)
    shape: tuple[int, int, int] = field((224, 224, 3), 'height, width and channels of an image', ge=1)
    classes: int = field(1000, 'number of classes', ge=2)


@dataclass(frozen=True, kw_only=True)
class VitConfig(BlockConfig):
    """Vision Transformer (Dosovitskiy et al. 2021)."""

    name: Literal['vit'] = field('vit', 'model')
    image: tuple[int, int] = field((32, 32), 'height and width of the input; other sizes are resized', ge=1)
    patch: tuple[int, int] = field((4, 4), 'height and width of a patch', ge=1)
    embedding: Literal['product', 'convolution', 'tokenizer'] = field(
        'product', 'patch embedding, as product or convolution; tokenizer: convolutions (Hassani et al. 2021)'
    )
    convolutions: int = field(2, 'layers of the convolutional tokenizer', ge=1)
    channels: int = field(64, 'channels of the layers of the tokenizer before its last', ge=1)
    positions: str = field('learned', 'position encoding', choices='attnlab.layers.positions:ENCODINGS')
    rotary_base: float = field(100.0, 'base of the frequencies of rotary positions', gt=1.0)
    pool: Literal['mean', 'class', 'attention'] = field('mean', 'pooling of tokens to one vector')
    registers: int = field(0, 'register tokens (Darcet et al. 2024)', ge=0)

    def check(self) -> None:
        """Limit the number of convolutions; require attention without a window."""
        super().check()
        check_depth('convolutions', self.convolutions)
        if self.mixer != 'attention' or self.window:
            raise UserError(
                f"mixer is {self.mixer!r} and window is {self.window}; expected 'attention' and 0 for images"
            )


@dataclass(frozen=True, kw_only=True)
class ResNetConfig(Section):
    """Residual network (He et al. 2016)."""

    name: Literal['resnet'] = field('resnet', 'model')
    image: tuple[int, int] = field((32, 32), 'height and width of the input; other sizes are resized', ge=1)
    width: int = field(16, 'channels of the first stage', ge=1)
    blocks: int = field(3, 'blocks of each of the three stages', ge=1)

    def check(self) -> None:
        """Limit the number of blocks."""
        check_depth('blocks', self.blocks)


@dataclass(frozen=True, kw_only=True)
class VisionConfig(RunConfig):
    """Image classification."""

    task: str = field('vision', 'task')
    data: Cifar10Data | Cifar100Data | DigitsData | ImageFiles = field(REQUIRED, 'images')
    model: VitConfig | ResNetConfig = field(REQUIRED, 'image model')


VIT_SIZES: dict[str, dict[str, Any]] = {
    'Ti': dict(layers=12, width=192, heads=3),  # Touvron et al. 2021
    'S': dict(layers=12, width=384, heads=6),
    'B': dict(layers=12, width=768, heads=12),  # Dosovitskiy et al. 2021, table 1
    'L': dict(layers=24, width=1024, heads=16),
    'H': dict(layers=32, width=1280, heads=16),
    'CIFAR-S': dict(layers=6, width=256, heads=4),  # for images of 32 x 32
    'CIFAR-Ti': dict(layers=4, width=96, heads=3),
}
"""Fields of `VitConfig` by the name of a model size."""
