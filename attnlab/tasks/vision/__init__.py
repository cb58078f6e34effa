"""Images that a model tells the class of."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import files
from attnlab.config import check_common
from attnlab.data.images import Images
from attnlab.kernels import axes
from attnlab.kernels.losses import Sums, cross_entropy
from attnlab.kernels.patches import resized_grid
from attnlab.tasks import transformer
from attnlab.tasks.task import Outline, Params, Task
from attnlab.tasks.vision import corpus, models, pictures, scores

SPLIT = 'test'
"""The split that `eval` scores unless told otherwise."""

BEST: tuple[str, Literal['max', 'min']] = ('accuracy', 'max')
"""The score, and its better end, that says which parameters to keep."""

EVALUATED = 250
"""About so many images are in one memory at once, where none is trained on."""

NONE = -1
"""The label of an empty row."""


def check(config: Any) -> None:
    """Raises UserError for values that no model or images can be made of, before anything is read or written."""
    check_common(config)
    corpus.check(config.data)
    check_model(config)


def check_model(config: Any) -> None:
    """Raises UserError for values that no model can be made of."""
    corpus.check_set(config.data)
    build_model(config)


def build_model(config: Any) -> models.Model:
    """The model of a config."""
    return models.build(config, corpus.classes(config.data), corpus.shape(config.data)[-1])


def outline(config: Any, layers: int | None, active: bool) -> Outline:
    """One image."""
    with config.copy_and_resolve_references().unlocked() as changed:
        if config.model.name == 'vit':
            changed.model = transformer.outlined(config.model, layers, active)
    model = build_model(changed)
    H, W = model.image
    C, classes = corpus.shape(config.data)[-1], corpus.classes(config.data)
    tokens = model.prefix + model.grid[0] * model.grid[1]
    what = f'{H} x {W} pixels' + (f', {tokens} tokens' if config.model.name == 'vit' else '') + f', {classes} classes'
    return Outline(
        what, tokens, jax.eval_shape(model.init, jax.random.key(0)),
        (jax.ShapeDtypeStruct((1, H, W, C), jnp.float32),),
        lambda params, images: model.forward(params, images, None)[0],
    )  # fmt: skip


def build(config: Any, workdir: Path) -> Task:
    """Data and model of a config; the channels' scale is that of its training images."""
    train, valid = corpus.read_training(config.data, config.seed)
    scale = corpus.scale_of(train)
    model = build_model(config)
    tell = teller(model, scale)
    smoothing = config.train.label_smoothing

    def loss(params: Params, batch: Any, rng: jax.Array) -> Sums:
        images = models.prepared(batch['images'], scale, model.image)
        logits, said = model.forward(params, images, rng)
        first, second = (
            cross_entropy(logits, batch[name], smoothing, NONE, share)
            for name, share in (('first', batch['share']), ('second', 1 - batch['share']))
        )
        weight = first.weight + second.weight
        more, watched = transformer.auxiliary(config.model, said, weight)
        right = jnp.sum((jnp.argmax(logits, axis=-1) == batch['first']) & (batch['first'] != NONE))
        extras = {'nll': first.extras['nll'] + second.extras['nll'], 'accuracy': right}
        return Sums(first.total + second.total + more, weight, extras | watched)

    return Task(
        save=lambda workdir: corpus.save(scale, workdir),
        examples=len(train.labels),
        init=model.init,
        batch=corpus.batch_of(config.data, train, config.train.batch_size, config.seed),
        loss=loss,
        evaluate=lambda params: scores.scores(tell(params, valid), valid.labels),
        best=BEST,
    )


def teller(model: models.Model, scale: corpus.Scale) -> Callable[[Params, Images], np.ndarray]:
    """(params, images) -> the probability of each class [n, classes] float64, every image once."""

    @jax.jit
    def probabilities(params: Params, pixels: jax.Array) -> jax.Array:
        logits, _ = model.forward(params, models.prepared(axes.spread(pixels), scale, model.image), None)
        return axes.whole(jax.nn.softmax(logits, axis=-1))

    def all_of(params: Params, whole: Images) -> np.ndarray:
        B = axes.at_once(EVALUATED, len(whole.labels))
        each = [probabilities(params, pixels) for pixels, _ in corpus.in_order(whole, B)]
        return np.concatenate([np.asarray(x, np.float64) for x in each])[: len(whole.labels)]

    return all_of


def init(config: Any, workdir: Path) -> Callable[[jax.Array], Params]:
    """A key gives fresh parameters."""
    return build_model(config).init


def evaluate(config: Any, workdir: Path, params: Params, split: str) -> dict[str, Any]:
    """All scores of a split; writes its confusion matrix and probabilities, and pictures of what the model does."""
    whole = corpus.read(config.data, split, config.seed)
    model, scale = build_model(config), corpus.load(workdir)
    found = teller(model, scale)(params, whole)
    samples = workdir / 'samples'
    table = scores.confusion(found, whole.labels)
    with files.optional(workdir):
        samples.mkdir(exist_ok=True)
        np.savez_compressed(
            samples / f'{split}.npz', probabilities=found.astype(np.float32), labels=whole.labels, confusion=table
        )
        pictures.evaluated(workdir, split, model, params, scale, whole, found)
    return {'split': split, 'images': len(whole.labels), **scores.scores(found, whole.labels)}


def attend(
    config: Any, workdir: Path, params: Params, texts: Sequence[str], layer: int | None, head: int | None
) -> None:
    """Draws the attention of every layer and head over images: numbers of the test split, from 0, or files."""
    model, scale = build_model(config), corpus.load(workdir)
    for path in pictures.attended(config, workdir, model, params, scale, texts, layer, head):
        print(path)


def adapted(config: Any, source: Any, params: Params) -> Params:
    """Parameters of a run of `source` for this config: learned positions are seen on its grid, and a head for other
    classes starts anew."""
    model, before = build_model(config), build_model(source)
    params = dict(params)
    if 'positions' in params and model.grid != before.grid:
        front = 0 if before.reader is None else 1
        table = resized_grid(params['positions']['table'], before.grid, model.grid, front)
        params['positions'] = {'table': table}
    if corpus.classes(config.data) != corpus.classes(source.data):
        params['head'] = jax.jit(model.init)(jax.random.key(config.seed))['head']
    return params

