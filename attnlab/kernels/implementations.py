"""The table of attention implementations.  It loads no JAX: configs, commands and docs read it too."""

import importlib
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast, runtime_checkable

if TYPE_CHECKING:
    from attnlab.kernels.call import AttentionCall, AttentionOutput


class Implementation(NamedTuple):
    """One line of the table.

    module: imported when the implementation is first used; it has the functions of `AttentionKernel`.
    description: one line for configs and docs.
    platforms: those of JAX ('cpu', 'gpu', 'tpu') that it runs on; empty: all.
    mesh_axis: the axis that the mesh in context must have, or None.
    gives_weights: whether it serves `return_weights`.
    """

    module: str
    description: str
    platforms: tuple[str, ...] = ()
    mesh_axis: str | None = None
    gives_weights: bool = False

    @property
    def runs_anywhere(self) -> bool:
        return not self.platforms and self.mesh_axis is None


@runtime_checkable  # the tests check annotations
class AttentionKernel(Protocol):
    """The functions of an implementation's module."""

    def dot_product(self, call: 'AttentionCall') -> 'AttentionOutput':
        """The attention of a checked call.  Raises NotImplementedError at once, naming the argument it cannot serve."""
        ...

    def pays(self, call: 'AttentionCall', platform: str) -> bool:
        """Whether it is likely faster, on this platform, than the implementations below it in the table."""
        ...


IMPLEMENTATIONS = {
    'ring': Implementation(
        'attnlab.kernels.ring', 'tokens divided over the devices of a mesh, memory O((T + S) / n) a device',
        mesh_axis='sequence',
    ),
    'cudnn': Implementation('attnlab.kernels.cudnn', "cuDNN's kernel for NVIDIA GPUs, bfloat16 and float16", ('gpu',)),
    'splash': Implementation('attnlab.kernels.splash', "JAX's kernel for TPUs", ('tpu',)),
    'blockwise': Implementation('attnlab.kernels.blockwise', 'online softmax over blocks, memory O(T + S)'),
    'dense': Implementation('attnlab.kernels.dense', 'the whole matrix; gives weights', gives_weights=True),
}  # fmt: skip
"""By name, in the order in which `implementation=None` prefers those that pay."""

IMPLEMENTATION_ALIASES = {'xla': 'dense'}  # the name in jax.nn

IMPLEMENTATION_CHOICES = ('auto', *IMPLEMENTATIONS, *IMPLEMENTATION_ALIASES)
"""The values of a config's field; 'auto' stands for None."""


def load_implementation(name: str) -> AttentionKernel:
    """The module of an implementation."""
    return cast(AttentionKernel, importlib.import_module(IMPLEMENTATIONS[name].module))


def implementations_by_speed(call: 'AttentionCall', platform: str) -> list[str]:
    """Implementations to try on a platform, the one that is likely the fastest first."""
    able = [name for name, entry in IMPLEMENTATIONS.items() if platform in (entry.platforms or (platform,))]
    first = [name for name in able if load_implementation(name).pays(call, platform)]
    return first + [name for name in able if name not in first and IMPLEMENTATIONS[name].runs_anywhere]
