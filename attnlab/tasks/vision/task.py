"""The task of image classification."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import files
from attnlab.configs import RunConfig, VisionConfig, VitConfig
from attnlab.data.images import Images
from attnlab.kernels import mesh_axes
from attnlab.kernels.losses import LossSums, cross_entropy
from attnlab.kernels.patches import resize_position_table
from attnlab.models.image import ImageModel, make_image_model
from attnlab.tasks import blocks, head_grid
from attnlab.tasks.checks import check_data_paths, check_model_init
from attnlab.tasks.task import AttentionMaps, Batch, Outline, Params
from attnlab.tasks.vision import dataset, image_files, pictures, scores
from attnlab.tasks.vision.preprocess import preprocess_images

EVALUATION_IMAGES = 250
"""Approximate number of images of an evaluation batch."""

NO_LABEL = -1
"""The label of an empty row."""


@dataclass(eq=False)
class VisionTask:
    """Image classification; a `Task`."""

    Config: ClassVar[type[RunConfig]] = VisionConfig
    best: ClassVar[tuple[str, Literal['max', 'min']]] = ('accuracy', 'max')
    default_split: ClassVar[str] = 'test'

    config: VisionConfig
    workdir: Path | None = None

    def check(self) -> None:
        """Raise UserError if a data path is empty or the model cannot be built; no data is read."""
        check_data_paths(self.config.data)
        self._check_model()

    def _check_model(self) -> None:
        check_model_init(self.config.model, self.model.init)

    def outline(self, layers: int | None, countable: bool) -> Outline:
        """Outline of one image."""
        self._check_model()
        config, data = self.config.model, self.config.data
        if isinstance(config, VitConfig):
            config = blocks.outline_config(config, layers, countable)
        classes, C = dataset.class_count(data), dataset.image_shape(data)[-1]
        model = make_image_model(config, classes, C)
        H, W = model.image_size
        tokens = model.module.num_prefix_tokens + math.prod(model.module.grid)
        description = f'{H} x {W} pixels' + (f', {tokens} tokens' if isinstance(config, VitConfig) else '')
        return Outline(
            f'{description}, {classes} classes', tokens, jax.eval_shape(model.init, jax.random.key(0)),
            (jax.ShapeDtypeStruct((1, H, W, C), jnp.float32),),
            lambda params, images: model.forward(params, images, None)[0],
        )  # fmt: skip

    # Data

    @cached_property
    def _splits(self) -> tuple[Images, Images]:
        """The training and validation splits."""
        return dataset.read_training_images(self.config.data, self.config.seed)

    @cached_property
    def statistics(self) -> dataset.ImageStatistics:
        """Statistics of the training images, loaded from `workdir` or computed."""
        if self.workdir is not None:
            return dataset.load_image_statistics(self.workdir)
        return dataset.compute_image_statistics(self._splits[0])

    @property
    def examples(self) -> int:
        """Number of training images."""
        return len(self._splits[0].labels)

    @cached_property
    def _batch_function(self) -> Callable[[int, slice], dict[str, np.ndarray]]:
        config = self.config
        return dataset.build_batch_function(config.data, self._splits[0], config.train.batch_size, config.seed)

    def batch(self, step: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        """Return the augmented images of a step, or some of its rows, as in `dataset.build_batch_function`."""
        return self._batch_function(step, rows)

    def save(self, workdir: Path) -> None:
        """Write the statistics of the training images."""
        dataset.save_image_statistics(self.statistics, workdir)

    # Model

    @cached_property
    def model(self) -> ImageModel:
        """The model for the classes and channels of the data."""
        data = self.config.data
        return make_image_model(self.config.model, dataset.class_count(data), dataset.image_shape(data)[-1])

    def init(self, rng: jax.Array) -> Params:
        """Return newly initialised parameters."""
        return self.model.init(rng)

    def loss(self, params: Params, batch: Batch, rng: jax.Array) -> LossSums:
        """Return the cross-entropy of both labels by their weights, and the auxiliary losses of experts.

        The logged accuracy counts images whose first label has the largest logit.
        """
        images = preprocess_images(batch['images'], self.statistics, self.model.image_size)
        logits, aux = self.model.forward(params, images, rng)
        first, second = (
            cross_entropy(logits, batch[name], self.config.train.label_smoothing, NO_LABEL, share)
            for name, share in (('first', batch['share']), ('second', 1 - batch['share']))
        )
        correct = jnp.sum((jnp.argmax(logits, axis=-1) == batch['first']) & (batch['first'] != NO_LABEL))
        extras = {'nll': first.extras['nll'] + second.extras['nll'], 'accuracy': correct}
        sums = LossSums(first.total + second.total, first.weight + second.weight, extras)
        return blocks.add_expert_losses(self.config.model, sums, aux)

    def adapt_params(self, source: 'VisionTask', params: Params) -> Params:
        """Return the parameters with learned positions interpolated to this model's grid.

        If the number of classes differs, the head is newly initialised.
        """
        grid, source_module = self.model.module.grid, source.model.module
        params = dict(params)
        if 'positions' in params and grid != source_module.grid:
            front = 0 if source_module.class_token_index is None else 1
            table = resize_position_table(params['positions']['table'], source_module.grid, grid, front)
            params['positions'] = {'table': table}
        if dataset.class_count(self.config.data) != dataset.class_count(source.config.data):
            params['head'] = jax.jit(self.init)(jax.random.key(self.config.seed))['head']
        return params

    # Scores

    @cached_property
    def _softmax(self) -> Callable[[Params, np.ndarray], jax.Array]:
        """Compiled function (params, pixels [B, H, W, C] uint8) -> probabilities [B, classes] float32."""

        @jax.jit
        def softmax(params: Params, pixels: jax.Array) -> jax.Array:
            images = preprocess_images(mesh_axes.shard_rows(pixels), self.statistics, self.model.image_size)
            return mesh_axes.replicate_arrays(jax.nn.softmax(self.model.forward(params, images, None)[0], axis=-1))

        return softmax

    def classify(self, params: Params, pixels: np.ndarray) -> np.ndarray:
        """Return the probability of each class, [n, classes] float64, for images [n, H, W, C] uint8.

        Raises ValueError for another dtype or another size than that of the training images.
        """
        shape = dataset.image_shape(self.config.data)
        if pixels.dtype != np.uint8 or pixels.shape[1:] != shape:
            raise ValueError(
                f'images are {pixels.dtype} {list(pixels.shape)}; expected uint8 [n, {", ".join(map(str, shape))}]'
            )
        return self.probabilities(params, Images(pixels, np.zeros(len(pixels), np.int32), ()))

    def probabilities(self, params: Params, images: Images) -> np.ndarray:
        """Return the probability of each class, [n, classes] float64."""
        B = mesh_axes.evaluation_batch_size(EVALUATION_IMAGES, len(images.labels))
        batches = [self._softmax(params, pixels) for pixels, _ in dataset.evaluation_batches(images, B)]
        return np.concatenate([np.asarray(x, np.float64) for x in batches])[: len(images.labels)]

    def validate(self, params: Params) -> dict[str, float]:
        """Return the scores of the validation split."""
        valid = self._splits[1]
        return scores.score_classification(self.probabilities(params, valid), valid.labels)

    def evaluate(self, params: Params, split: str) -> dict[str, Any]:
        """Return all scores of a split; write its probabilities, confusion matrix, and figures such as attention."""
        images = dataset.read_images(self.config.data, split, self.config.seed)
        probabilities = self.probabilities(params, images)
        if self.workdir is not None:
            with files.log_write_errors(self.workdir):
                folder = self.workdir / 'samples'
                folder.mkdir(exist_ok=True)
                np.savez_compressed(
                    folder / f'{split}.npz', probabilities=probabilities.astype(np.float32), labels=images.labels,
                    confusion=scores.confusion_matrix(probabilities, images.labels),
                )  # fmt: skip
                folder = self.workdir / 'figures' / f'eval-{split}'
                pictures.write_evaluation_pictures(folder, self.model, params, self.statistics, images, probabilities)
        result = {'split': split, 'images': len(images.labels)}
        return result | scores.score_classification(probabilities, images.labels)

    # Use

    def attend(self, params: Params, texts: Sequence[str], layer: int | None, head: int | None) -> None:
        """Draw the attention over images, each a number in the test split, from 0, or a file; print the paths.

        layer, head: counted from 1; None draws all.
        """
        images = image_files.load_chosen_images(self.config.data, self.config.seed, texts)
        for text, image in zip(texts, images, strict=True):
            maps = self._maps(params, image)
            folder = head_grid.figure_path(self.workdir or Path(), 'attend', text)
            pictures.draw_image_attention(folder, image, maps, self.model, layer, head)

    def attention_maps(self, params: Params, text: str) -> AttentionMaps:
        """Return the attention of every layer and head over an image: its number in the test split, or a file."""
        (image,) = image_files.load_chosen_images(self.config.data, self.config.seed, [text])
        return AttentionMaps(self._maps(params, image), {})

    def _maps(self, params: Params, image: np.ndarray) -> dict[str, np.ndarray]:
        """Return the attention weights [L, N, T, T] of each kind over an image [H, W, C] uint8."""
        maps = pictures.compute_attention_maps(self.model, params, self.statistics, image[None])
        return {kind: weights[0] for kind, weights in maps.items()}
