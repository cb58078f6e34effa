"""The functions that keep the attention contract."""

from functools import partial

import jax.numpy as jnp
import jaxtyping
import pytest

from attnlab import additive_attention, dot_product_attention
from tests.kernels.calls import compiled


def _additive(query, key, value, bias=None, mask=None, **kwargs):
    N, H = query.shape[-2:]
    score = jnp.cos(jnp.arange(N * H, dtype=jnp.float32)).reshape(N, H).astype(query.dtype)
    return additive_attention(query, key, value, score, bias, mask, **kwargs)


def _dense(*args, **kwargs):
    return dot_product_attention(*args, implementation='dense', **kwargs)


ATTENTION = {'dense': partial(compiled, _dense), 'additive': partial(compiled, _additive)}


@pytest.fixture(params=ATTENTION)
def attend(request):
    """Every attention function, called as the dot product's; the additive one has a score vector of its own."""
    return ATTENTION[request.param]


@pytest.fixture
def as_used():
    """Without the checks of annotations, which in the tests raise before the function's own errors do."""
    jaxtyping.config.update('jaxtyping_disable', True)
    yield
    jaxtyping.config.update('jaxtyping_disable', False)
