"""The table of attention implementations.  It does not import JAX, because configs, commands and docs read it too."""

import importlib
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast, runtime_checkable

if TYPE_CHECKING:
    from attnlab.kernels.call import AttentionCall, AttentionOutput


class Implementation(NamedTuple):
    """One line of the table of implementations.

    module: has the functions of `AttentionKernel`; imported at the first use of the implementation.
    description: one line for configs and docs.
    platforms: the JAX platforms ('cpu', 'gpu', 'tpu') on which it runs; empty: all.
    mesh_axis: the axis that the mesh in context must have, or None.
    returns_weights: whether it supports `return_weights`.
    """

    module: str
    description: str
    platforms: tuple[str, ...] = ()
    mesh_axis: str | None = None
    returns_weights: bool = False

    @property
    def runs_anywhere(self) -> bool:
        """Whether it needs neither a certain platform nor a mesh."""
        return not self.platforms and self.mesh_axis is None


@runtime_checkable  # the tests check annotations
class AttentionKernel(Protocol):
    """The functions of an implementation's module."""

    def dot_product(self, call: 'AttentionCall') -> 'AttentionOutput':
        """Return the attention of a checked call.

        Raises NotImplementedError before any computation, with the name of the argument that is not supported.
        """
        ...

    def is_preferred(self, call: 'AttentionCall', platform: str) -> bool:
        """Return whether it is likely faster, on this platform, than the implementations below it in the table."""
        ...


IMPLEMENTATIONS = {
    'ring': Implementation(
        'attnlab.kernels.ring', 'tokens divided over the devices of a mesh, memory O((T + S) / n) a device',
        mesh_axis='sequence',
    ),
    'cudnn': Implementation('attnlab.kernels.cudnn', "cuDNN's kernel for NVIDIA GPUs, bfloat16 and float16", ('gpu',)),
    'splash': Implementation('attnlab.kernels.splash', "JAX's kernel for TPUs", ('tpu',)),
    'blockwise': Implementation('attnlab.kernels.blockwise', 'online softmax over blocks, memory O(T + S)'),
    'dense': Implementation('attnlab.kernels.dense', 'the whole matrix; returns weights', returns_weights=True),
}  # fmt: skip
"""Implementations by name, in the order in which `implementation=None` tries the preferred ones."""

IMPLEMENTATION_ALIASES = {'xla': 'dense'}  # the name in jax.nn

IMPLEMENTATION_CHOICES = ('auto', *IMPLEMENTATIONS, *IMPLEMENTATION_ALIASES)
"""The allowed values of a config's field; 'auto' stands for None."""


def load_implementation(name: str) -> AttentionKernel:
    """Import the module of an implementation."""
    return cast(AttentionKernel, importlib.import_module(IMPLEMENTATIONS[name].module))


def implementations_by_speed(call: 'AttentionCall', platform: str) -> list[str]:
    """Return the names of the implementations to try on a platform, likely the fastest first."""
    runnable = [name for name, entry in IMPLEMENTATIONS.items() if platform in (entry.platforms or (platform,))]
    preferred = [name for name in runnable if load_implementation(name).is_preferred(call, platform)]
    others = [name for name in runnable if name not in preferred and IMPLEMENTATIONS[name].runs_anywhere]
    return preferred + others
