"""The devices of this process, and which part of a step lies on which."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attnlab.errors import UserError


def data_mesh(wanted: int, rows: int) -> Mesh:
    """The first devices, as many as are wanted, as an axis `data`; 0: as many as divide so many rows.

    Raises UserError for more than there are, and for a number that does not divide the rows.
    """
    every = jax.devices()
    if wanted > len(every) or wanted < 0:
        raise UserError(f'train.devices is {wanted}; expected 0 (all) to {len(every)}, those of this process')
    if wanted and rows % wanted:
        raise UserError(f'train.devices is {wanted}; expected a divisor of the {rows} rows of a (micro-)batch')
    count = wanted or max(n for n in range(1, len(every) + 1) if rows % n == 0)
    return Mesh(np.array(every[:count]), ('data',))


def everywhere(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh, axis: int = 0) -> NamedSharding:
    """An axis of rows divided among the devices."""
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, 'data'))


def local(tree: Any) -> Any:
    """Arrays that lie on every device, as they lie on the first: what one device is to go on with."""
    return jax.tree.map(lambda x: x.addressable_data(0), tree)
