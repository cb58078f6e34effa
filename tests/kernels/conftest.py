"""The functions that keep the attention contract."""

from functools import partial

import jax.numpy as jnp
import pytest

from attnlab import additive_attention, dot_product_attention
from tests.kernels.calls import compiled


def _additive(query, key, value, bias=None, mask=None, **kwargs):
    N, H = query.shape[-2:]
    score = jnp.cos(jnp.arange(N * H, dtype=jnp.float32)).reshape(N, H).astype(query.dtype)
    return additive_attention(query, key, value, score, bias, mask, **kwargs)


def _dense(*args, **kwargs):
    return dot_product_attention(*args, implementation='dense', **kwargs)


def _blockwise(*args, return_weights=False, **kwargs):
    """In several tiles even where all is small.  It has no weights; where a test asks for them, they are dense's."""
    with pytest.raises(NotImplementedError, match='return_weights'):
        dot_product_attention(*args, implementation='blockwise', return_weights=True, **kwargs)
    made = dot_product_attention(*args, implementation='blockwise', block_sizes=(2, 3), **kwargs)
    if not return_weights:
        return made
    made = made if isinstance(made, tuple) else (made,)
    *_, weights = dot_product_attention(*args, implementation='dense', return_weights=True, **kwargs)
    return *made, weights


ATTENTION = {
    'dense': partial(compiled, _dense),
    'blockwise': partial(compiled, _blockwise),
    'additive': partial(compiled, _additive),
}


@pytest.fixture(params=ATTENTION)
def attend(request):
    """Every attention function, called as the dot product's; the additive one has a score vector of its own."""
    return ATTENTION[request.param]
