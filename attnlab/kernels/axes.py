"""The axes of a mesh of devices by name, and what of an array is divided over which."""

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

AXES: tuple[str, ...] = ('data', 'fsdp', 'expert', 'sequence', 'tensor')
"""All that a mesh may have, those first between whose devices the least is sent."""

ROWS = ('data', 'fsdp', 'expert')
"""Over these the rows of a batch are divided."""

TOKENS = 'sequence'
"""Over this the tokens of each row."""

HEADS = 'tensor'
"""Over this heads, hidden activations and the vocabulary."""


def spread(x: Float[Array, 'B T D']) -> Float[Array, 'B T D']:
    """x as it is, its rows and tokens divided as those of a batch are, where a mesh is in context (`jax.set_mesh`).

    Without it the compiler may gather activations where it should gather parameters.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(ROWS, TOKENS))
