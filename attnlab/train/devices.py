"""The devices of this process, and which part of a step lies on which."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attnlab.errors import UserError

Parallel = Literal['jit', 'pmap']
AXIS = 'data'
"""The axis of rows that devices share."""


class Layout(NamedTuple):
    """How a batch of rows is divided among devices that all have the whole state.

    count: how many devices.
    axis: over which a step adds up gradients and sums by itself; None where the compiler sees to it.
    constrain: of micro-batches [accumulate, rows, ...] inside a step, says which device has which rows.
    compile: (state, batch) -> (state, values), pure, as it runs on all devices, taking over the state's memory.
    state, batch: arrays of one device, or of the host, as `compile`d steps take them.
    local: what lies on every device, state or values, as one device has it.
    """

    count: int
    axis: str | None
    constrain: Callable[[Any], Any]
    compile: Callable[[Callable[..., Any]], Callable[..., Any]]
    state: Callable[[Any], Any]
    batch: Callable[[Any], Any]
    local: Callable[[Any], Any]


def layout(parallel: Parallel, wanted: int, rows: int) -> Layout:
    """Of so many rows on the first devices, as many as are wanted; 0: as many as divide the rows.

    'jit' is one program over all devices, with the same noise and the same experts' losses on any number of them.
    'pmap' is a program a device: noise and experts' losses are those of its own rows.

    Raises UserError for more devices than there are, and for a number that does not divide the rows.
    """
    every = jax.devices()
    if wanted > len(every) or wanted < 0:
        raise UserError(f'train.devices is {wanted}; expected 0 (all) to {len(every)}, those of this process')
    if wanted and rows % wanted:
        raise UserError(f'train.devices is {wanted}; expected a divisor of the {rows} rows of a (micro-)batch')
    count = wanted or max(n for n in range(1, len(every) + 1) if rows % n == 0)
    match parallel:
        case 'jit':
            return _jit(every[:count])
        case 'pmap':
            return _pmap(every[:count])
        case other:
            raise UserError(f"train.parallel is {other!r}; expected 'jit' or 'pmap'")


def _jit(devices: list[Any]) -> Layout:
    mesh = Mesh(np.array(devices), (AXIS,))
    everywhere = NamedSharding(mesh, PartitionSpec())
    divided = lambda axis: NamedSharding(mesh, PartitionSpec(*[None] * axis, AXIS))
    return Layout(
        count=len(devices),
        axis=None,
        constrain=lambda parts: jax.lax.with_sharding_constraint(parts, divided(1)),
        compile=lambda step: jax.jit(step, donate_argnums=0, out_shardings=everywhere),
        state=lambda tree: jax.device_put(tree, everywhere),
        batch=lambda tree: jax.device_put(tree, divided(0)),
        local=lambda tree: jax.tree.map(lambda x: x.addressable_data(0), tree),
    )


def _pmap(devices: list[Any]) -> Layout:
    n = len(devices)
    copies = jax.pmap(lambda tree, _: tree, in_axes=(None, 0), devices=devices)
    return Layout(
        count=n,
        axis=AXIS,
        constrain=lambda parts: parts,
        compile=lambda step: jax.pmap(step, AXIS, donate_argnums=0, devices=devices),
        state=lambda tree: copies(tree, jnp.arange(n)),
        batch=lambda tree: jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]), tree),
        local=lambda tree: jax.tree.map(lambda x: x.addressable_data(0)[0], tree),
    )
