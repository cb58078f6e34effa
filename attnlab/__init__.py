"""attnlab: attention and Transformers as pure functions, Flax modules and experiments.

The letters of every shape, einsum and annotation in this package:

B batch, T query length, S key and value length, N query heads, K key and value heads, G = N / K,
H head width, D model width, F MLP width, V vocabulary, E experts, A experts active per token, L layers.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnlab.kernels.additive import additive_attention
    from attnlab.kernels.attention import dot_product_attention

__version__ = '0.1.0'
__all__ = ['additive_attention', 'dot_product_attention']

_HOMES = {'additive_attention': 'attnlab.kernels.additive', 'dot_product_attention': 'attnlab.kernels.attention'}


def __getattr__(name: str) -> Any:
    """The kernels load JAX, so they are imported when first asked for: `attnlab --help` stays instant."""
    if name not in _HOMES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(importlib.import_module(_HOMES[name]), name)
