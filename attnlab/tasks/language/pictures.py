"""What one looks at: the attention of a language model over a text."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.data.tokens import Tokens
from attnlab.errors import UserError
from attnlab.models.language import LanguageModel
from attnlab.models.maps import attention_maps
from attnlab.tasks import headmaps
from attnlab.tasks.language.writer import start
from attnlab.tasks.task import Params


def show(
    workdir: Path,
    model: LanguageModel,
    params: Params,
    vocabulary: Tokens,
    text: str,
    documents: bool,
    layer: int | None,
    head: int | None,
) -> None:
    """Draws the attention of each layer and head over a text, and prints the files.

    Raises UserError for a text of more tokens than the model's context.
    """
    ids = start(vocabulary, text, documents)
    if len(ids) > model.context:
        raise UserError(f'the text has {len(ids)} tokens; expected at most {model.context}, the context of the model')
    maps = over(model, params, ids)
    labels = vocabulary.pieces(ids)
    folder = Path(workdir) / 'figures' / f'attend-{headmaps.slug(text)}'
    for path in headmaps.write(folder, maps, {kind: (labels, labels) for kind in maps}, layer, head):
        print(path)


def over(model: LanguageModel, params: Params, ids: np.ndarray) -> dict[str, np.ndarray]:
    """The weights [L, N, T, T] of each kind of attention over the tokens [T]."""
    tokens = jnp.asarray(ids, jnp.int32)[None]
    sown: Any = model.apply({'params': params}, tokens, mutable=['intermediates'])[1]
    maps = attention_maps(sown.get('intermediates', {}))
    return {kind: jax.device_get(weights[0]) for kind, weights in maps.items()}
