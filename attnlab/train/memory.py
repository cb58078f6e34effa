"""Whether a config can fit into memory, from shapes alone, before anything is compiled."""

from functools import partial

import jax
import numpy as np

from attnlab import environment
from attnlab.errors import UserError
from attnlab.tasks.task import SupportsOutline, Task
from attnlab.train import cost
from attnlab.train.setup import Setup


def check_memory(task: Task, setup: Setup) -> None:
    """Raise UserError for a state or a batch that is larger than the memory for it.

    The state is the parameters, the optimizer's state and one gradient.  Activations come on top: a config that passes
    may still not fit.  Without this check XLA ends the process, or waits for memory without an end.
    """
    layout = setup.layout
    # Not a batch itself: its order alone may be larger than the memory.
    rows = task.outline(1, False).batch if isinstance(task, SupportsOutline) else ()
    batch = cost.tree_bytes(rows) * setup.config.train.batch_size
    shapes = layout.stored(jax.eval_shape(partial(setup.initial, task.init), np.uint32(0)))
    state = cost.device_bytes(shapes) + cost.device_bytes(shapes.params)
    device = jax.local_devices()[0]
    if device.platform == 'cpu':  # all CPU devices share the host's memory
        needed = state * min(layout.count, jax.local_device_count()) + batch
        room, where = environment.host_memory_bytes(), 'this machine has'
    else:
        needed, room = state + batch // layout.count, (device.memory_stats() or {}).get('bytes_limit')
        where = f'{device.device_kind} has'
    if room is not None and needed > room:
        raise UserError(
            f'parameters, optimizer and gradients take {cost.format_bytes(state)} on each device and a batch '
            f'{cost.format_bytes(batch)}; {where} {cost.format_bytes(room)} of memory; expected a smaller model or train.batch_size'
        )
