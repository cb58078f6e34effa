"""Where a step that is not finite went wrong first, found by running it once more with every module watched.

A task's loss is a function; `flax.linen.intercept_methods` sees the modules inside it as they are traced, and a
callback in the compiled program, ordered, tells what each gave as it ran: in every turn of a scan, under remat too.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from attnlab.tasks.task import Batch, Params, Task
from attnlab.train import checksum, precision
from attnlab.train.setup import Setup
from attnlab.train.step import LossFunction, StepMetrics, TrainState, noise_keys


def remember_states(
    update: Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]], task: Task, setup: Setup
) -> tuple[Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]], Callable[[int], str]]:
    """An update that keeps the states before the last two steps, and a function that explains either step's failure.

    The explanation runs the step again on one device, part by part.
    """
    layout, config = setup.layout, setup.config
    states: deque[TrainState] = deque(maxlen=2)  # metrics are read a step later

    def run(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        states.append(jax.tree.map(jnp.copy, state))  # the step donates the state's memory
        return update(state, batch)

    def parts(step: int) -> Iterator[tuple[Batch, jax.Array]]:
        count = 1 if layout.axis is None else layout.count
        for device in range(count):
            place = None if layout.axis is None else device
            keys = noise_keys(np.uint32(config.seed), config.train.accumulate, step, place)
            for i, key in enumerate(keys):
                yield _part(_part(task.batch(step), count, device), len(keys), i), key

    def explain(step: int) -> str:
        before = next(state for state in map(layout.local, states) if int(state.step) == step - 1)
        return find_nonfinite(task.loss, before.params, parts(step - 1), before.scale)

    return run, explain


def _part(batch: Batch, count: int, i: int) -> Batch:
    return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:])[i], batch)


class ModuleCall(NamedTuple):
    """One call of a module, in the order in which they ended: `site` is its place in the program, which a scan runs
    several times; whether what came in and what came out was finite."""

    path: tuple[str, ...]
    method: str
    site: int
    came: bool
    made: bool


def find_nonfinite(
    loss: LossFunction,
    params: Params,
    parts: Iterable[tuple[Batch, jax.Array]],
    scale: precision.LossScale | None = None,
) -> str:
    """What was not finite first, in one line without a full stop: a parameter, an input, a module's output, the loss
    or, the nearest to the output, a parameter's gradient.

    parts: (batch, key) of all micro-batches of the step, in their order.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not _whole(leaf):
            return f'the parameter {checksum.path_string(path)} was not finite before the step'
    for batch, key in parts:
        for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
            if not _whole(leaf):
                return f'the input {checksum.path_string(path)} is not finite'
        outputs, depths, total = _forward(loss, params, batch, key)
        bad = next((i for i, each in enumerate(outputs) if not each.made), None)
        if bad is not None:
            return _told(outputs, bad)
        if not np.isfinite(total):
            return f'the outputs of all modules are finite, the loss made of them is {total}'
        grads, _ = jax.jit(precision.make_scaled_gradient(loss, scale))(params, batch, key)
        if worst := _nearest(grads, outputs, depths):
            return f'the forward pass is finite; nearest to the output, the gradient of {worst} is not'
    return 'run again on one device, every gradient is finite'


def _forward(
    loss: LossFunction, params: Params, batch: Batch, key: jax.Array
) -> tuple[list[ModuleCall], dict[tuple[str, ...], int], float]:
    """All modules' outputs, the number of axes that each parameter has inside its module, and the loss."""
    outputs: list[ModuleCall] = []
    depths: dict[tuple[str, ...], int] = {}
    sites = iter(range(10**9))

    def note(path: tuple[str, ...], method: str, site: int, came: Any, made: Any) -> None:
        outputs.append(ModuleCall(path, method, site, bool(came), bool(made)))

    def watched(call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        made = call(*args, **kwargs)
        module = context.module
        own = module.variables.get('params', {}) if module.scope is not None else {}
        depths.update({(*module.path, name): x.ndim for name, x in own.items() if hasattr(x, 'ndim')})
        if _floats(made):
            told = partial(note, module.path, context.method_name, next(sites))
            jax.debug.callback(told, _finite((args, kwargs)), _finite(made), ordered=True)
        return made

    def run(params: Params, batch: Batch, key: jax.Array) -> jax.Array:
        with nn.intercept_methods(watched):
            return loss(params, batch, key).total

    total = float(jax.jit(run)(params, batch, key))
    jax.effects_barrier()
    return outputs, depths, total


def _told(outputs: list[ModuleCall], bad: int) -> str:
    each = outputs[bad]
    name = '/'.join(each.path) or 'the model'
    if each.method != '__call__':
        name += f'.{each.method}'
    turns = [i for i, other in enumerate(outputs) if other.site == each.site]
    if len(turns) > 1:
        name += f' in turn {turns.index(bad)} (of 0 to {len(turns) - 1}) of its scan'
    if each.came:
        return f'the first output that is not finite is that of {name}, from finite inputs'
    return f'the first module that meets what is not finite is {name}: its input, made between modules, is not'


def _nearest(grads: Params, outputs: list[ModuleCall], depths: dict[tuple[str, ...], int]) -> str | None:
    """The parameter whose gradient is not finite and whose module ran last, with its layer if a scan has several."""
    ends: dict[tuple[str, ...], list[int]] = {}
    for i, each in enumerate(outputs):
        ends.setdefault(each.path, []).append(i)
    found: list[tuple[int, str]] = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(grads)[0]:
        names = tuple(checksum.path_string(path).split('/'))
        ran = ends.get(names[:-1], [-1]) if len(names) > 1 else [-1]  # the whole model ends last and says nothing
        whole = np.isfinite(np.asarray(leaf, np.float32))
        if depths.get(names, leaf.ndim) < leaf.ndim:
            layers = len(leaf)
            each = max(len(ran) // layers, 1)
            found += [(ran[min((layer + 1) * each, len(ran)) - 1], f'{checksum.path_string(path)}[{layer}]')
                      for layer in range(layers) if not whole[layer].all()]  # fmt: skip
        elif not whole.all():
            found.append((ran[-1], checksum.path_string(path)))
    return max(found)[1] if found else None


def _floats(tree: Any) -> list[Any]:
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array | np.ndarray)]
    return [x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)]


def _finite(tree: Any) -> Any:
    return precision.all_finite(_floats(tree)) if _floats(tree) else np.True_


def _whole(leaf: Any) -> bool:
    return not _floats(leaf) or bool(_finite(leaf))
