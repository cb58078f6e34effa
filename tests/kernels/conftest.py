"""The attention functions that the tests of the common contract run on."""

from functools import partial

import jax.numpy as jnp
import pytest

from attnlab import additive_attention, dot_product_attention
from tests.kernels.calls import run_compiled


def _additive(query, key, value, bias=None, mask=None, **kwargs):
    N, H = query.shape[-2:]
    score = jnp.cos(jnp.arange(N * H, dtype=jnp.float32)).reshape(N, H).astype(query.dtype)
    return additive_attention(query, key, value, score, bias, mask, **kwargs)


def _dense(*args, **kwargs):
    return dot_product_attention(*args, implementation='dense', **kwargs)


def _blockwise(*args, return_weights=False, **kwargs):
    """Call `blockwise` with blocks small enough for several tiles.

    It returns no weights; if a test requests them, they come from `dense`.
    """
    with pytest.raises(NotImplementedError, match='return_weights'):
        dot_product_attention(*args, implementation='blockwise', return_weights=True, **kwargs)
    results = dot_product_attention(*args, implementation='blockwise', block_sizes=(2, 3), **kwargs)
    if not return_weights:
        return results
    results = results if isinstance(results, tuple) else (results,)
    *_, weights = dot_product_attention(*args, implementation='dense', return_weights=True, **kwargs)
    return *results, weights


ATTENTION = {
    'dense': partial(run_compiled, _dense),
    'blockwise': partial(run_compiled, _blockwise),
    'additive': partial(run_compiled, _additive),
}


@pytest.fixture(params=ATTENTION)
def attend(request):
    """Every attention function, with the signature of the dot product; the additive one has a fixed score vector."""
    return ATTENTION[request.param]
