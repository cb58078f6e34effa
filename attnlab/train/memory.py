"""Whether a config can fit into memory, from shapes alone, before anything is compiled."""

import jax
import numpy as np
from ml_collections import ConfigDict

from attnlab import environment
from attnlab.configs import config_dict
from attnlab.errors import UserError
from attnlab.tasks.task import Outlined, Task
from attnlab.train import cost, devices, loop, traffic


def check(task: Task) -> None:
    """Raise UserError for a state or a batch that is larger than the memory for it.

    The state is the parameters, the optimizer's state and one gradient.  Activations come on top: a config that passes
    may still not fit.  Without this check XLA ends the process, or waits for memory without an end.
    """
    config = config_dict(task.config)
    layout = loop.layout_of(config)
    # Not a batch itself: its order alone may be larger than the memory.
    rows = task.outline(1, False).batch if isinstance(task, Outlined) else ()
    batch = cost.tree_bytes(rows) * task.config.train.batch_size
    state = _state_bytes(config, task, layout)
    device = jax.local_devices()[0]
    if device.platform == 'cpu':  # all CPU devices share the host's memory
        needed = state * min(layout.count, jax.local_device_count()) + batch
        room, where = environment.memory(), 'this machine has'
    else:
        needed, room = state + batch // layout.count, (device.memory_stats() or {}).get('bytes_limit')
        where = f'{device.device_kind} has'
    if room is not None and needed > room:
        came = f'parameters, optimizer and gradients take {_size(state)} on each device and a batch {_size(batch)}'
        wanted = 'expected a smaller model or train.batch_size'
        raise UserError(f'{came}; {where} {_size(room)} of memory; {wanted}')


def _state_bytes(config: ConfigDict, task: Task, layout: devices.Layout) -> int:
    """Bytes on one device of a state and a gradient."""
    state = layout.stored(jax.eval_shape(loop.starter(config, task), np.uint32(0), None))
    return traffic.bytes_of_one(state) + traffic.bytes_of_one(state.params)


def _size(count: float) -> str:
    for unit in ('B', 'kB', 'MB', 'GB', 'TB', 'PB'):
        if count < 1000 or unit == 'PB':
            break
        count /= 1000
    return f'{count:.4g} {unit}'
