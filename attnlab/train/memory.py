"""Check whether a config fits into memory, from shapes alone, before anything is compiled."""

from functools import partial

import jax
import numpy as np

from attnlab import environment
from attnlab.errors import UserError
from attnlab.tasks.task import SupportsOutline, Task
from attnlab.train import cost
from attnlab.train.setup import Setup


def check_memory(task: Task, setup: Setup) -> None:
    """Raise UserError if the training state and a batch need more memory than there is.

    The training state is the parameters, the optimizer's state and one gradient.  Activations are not counted: a config
    that passes may still not fit.  Without this check XLA ends the process, or waits for memory forever.
    """
    layout = setup.layout
    # The batch size times one row of the batch.  A whole batch may not be made here: the random order of its rows alone
    # may need more memory than there is.
    row = task.outline(1, False).batch if isinstance(task, SupportsOutline) else ()
    batch_bytes = cost.tree_bytes(row) * setup.config.train.batch_size
    shapes = layout.stored_shapes(jax.eval_shape(partial(setup.initial_state, task.init), np.uint32(0)))
    state_bytes = cost.device_bytes(shapes) + cost.device_bytes(shapes.params)
    device = jax.local_devices()[0]
    if device.platform == 'cpu':  # all CPU devices share the memory of the host
        needed = state_bytes * min(layout.device_count, jax.local_device_count()) + batch_bytes
        available, owner = environment.host_memory_bytes(), 'this machine has'
    else:
        needed = state_bytes + batch_bytes // layout.device_count
        available, owner = (device.memory_stats() or {}).get('bytes_limit'), f'{device.device_kind} has'
    if available is not None and needed > available:
        raise UserError(
            f'parameters, optimizer and gradients take {cost.format_bytes(state_bytes)} on each device and a batch '
            f'{cost.format_bytes(batch_bytes)}; {owner} {cost.format_bytes(available)} of memory; '
            'expected a smaller model or train.batch_size'
        )
