"""Search for the first value of a training step that was not finite, by running the step again part by part.

`flax.linen.intercept_methods` wraps the modules inside a task's loss function while it is traced.  An ordered callback
in the compiled program then records, for each call of a module, whether its inputs and outputs were finite; also in
every iteration of a scan, and under remat.
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
    """Return a step that keeps the states before the last two steps, and a function that explains their failure.

    The explaining function takes the number of one of the two steps, runs that step again on one device, and returns
    the result of `find_nonfinite`.
    """
    layout, config = setup.layout, setup.config
    states: deque[TrainState] = deque(maxlen=2)  # two, because metrics are read one step late

    def update_and_remember(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        states.append(jax.tree.map(jnp.copy, state))  # a copy, because the step donates the memory of the state
        return update(state, batch)

    def micro_batches(index: int) -> Iterator[tuple[Batch, jax.Array]]:
        """Yield the micro-batches of a step, and the PRNG key of each, in order.  index: of the step, from 0."""
        draws_own_noise = layout.axis is not None
        device_count = layout.device_count if draws_own_noise else 1
        for device in range(device_count):
            keys = noise_keys(
                np.uint32(config.seed), config.train.accumulate, index, device if draws_own_noise else None
            )
            for i, key in enumerate(keys):
                yield _slice_batch(_slice_batch(task.batch(index), device_count, device), len(keys), i), key

    def explain(step: int) -> str:
        state_before = next(state for state in map(layout.to_local, states) if int(state.step) == step - 1)
        return find_nonfinite(task.loss, state_before.params, micro_batches(step - 1), state_before.loss_scale)

    return update_and_remember, explain


def _slice_batch(batch: Batch, count: int, i: int) -> Batch:
    """Return part i of a batch divided into `count` parts of consecutive rows."""
    return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:])[i], batch)


class ModuleCall(NamedTuple):
    """One call of a module's method.

    path: path of the module.
    method: name of the method.
    site: number of the call in the traced program; calls in different iterations of a scan have the same.
    finite_inputs, finite_outputs: whether all inputs, parameters not included, and all outputs were finite.
    """

    path: tuple[str, ...]
    method: str
    site: int
    finite_inputs: bool
    finite_outputs: bool


def find_nonfinite(
    loss: LossFunction,
    params: Params,
    micro_batches: Iterable[tuple[Batch, jax.Array]],
    scale: precision.LossScale | None = None,
) -> str:
    """Return a description of the first value that was not finite, in one line without a full stop.

    That is a parameter, an input, the output of a module, the loss, or, of the gradients, the one of the parameter that
    is nearest to the output.

    micro_batches: (batch, PRNG key of shape []) of all micro-batches of the step, in order.
    scale: the loss scale of the step, if it has one.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not _is_finite_leaf(leaf):
            return f'the parameter {checksum.path_string(path)} was not finite before the step'
    for batch, key in micro_batches:
        for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
            if not _is_finite_leaf(leaf):
                return f'the input {checksum.path_string(path)} is not finite'
        calls, depths, total = _record_forward(loss, params, batch, key)
        first_bad = next((i for i, call in enumerate(calls) if not call.finite_outputs), None)
        if first_bad is not None:
            return _describe_call(calls, first_bad)
        if not np.isfinite(total):
            return f'the outputs of all modules are finite, the loss computed from them is {total}'
        grads, _ = jax.jit(precision.make_scaled_gradient(loss, scale))(params, batch, key)
        if parameter := _last_nonfinite_gradient(grads, calls, depths):
            return f'the forward pass is finite; nearest to the output, the gradient of {parameter} is not'
    return 'run again on one device, every gradient is finite'


def _record_forward(
    loss: LossFunction, params: Params, batch: Batch, key: jax.Array
) -> tuple[list[ModuleCall], dict[tuple[str, ...], int], float]:
    """Run the forward pass; return all module calls in the order in which they ended, parameter depths, and the loss.

    The depth of a parameter is its number of axes inside of its module, without the layer axis of a scan.
    """
    calls: list[ModuleCall] = []
    depths: dict[tuple[str, ...], int] = {}
    sites = iter(range(10**9))

    def record_call(path: tuple[str, ...], method: str, site: int, inputs: Any, outputs: Any) -> None:
        calls.append(ModuleCall(path, method, site, bool(inputs), bool(outputs)))

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        outputs = call(*args, **kwargs)
        module = context.module
        own_params = module.variables.get('params', {}) if module.scope is not None else {}
        depths.update({(*module.path, name): x.ndim for name, x in own_params.items() if hasattr(x, 'ndim')})
        if _float_leaves(outputs):
            record = partial(record_call, module.path, context.method_name, next(sites))
            jax.debug.callback(record, _all_finite((args, kwargs)), _all_finite(outputs), ordered=True)
        return outputs

    def run(params: Params, batch: Batch, key: jax.Array) -> jax.Array:
        with nn.intercept_methods(intercept):
            return loss(params, batch, key).total

    total = float(jax.jit(run)(params, batch, key))
    jax.effects_barrier()
    return calls, depths, total


def _describe_call(calls: list[ModuleCall], index: int) -> str:
    """Describe the call `index`, the first one whose outputs were not finite."""
    call = calls[index]
    name = '/'.join(call.path) or 'the model'
    if call.method != '__call__':
        name += f'.{call.method}'
    iterations = [i for i, other in enumerate(calls) if other.site == call.site]
    if len(iterations) > 1:
        name += f' in iteration {iterations.index(index)} (of 0 to {len(iterations) - 1}) of its scan'
    if call.finite_inputs:
        return f'the first output that is not finite is that of {name}, from finite inputs'
    return f'the first input that is not finite is that of {name}; it was computed between modules'


def _last_nonfinite_gradient(grads: Params, calls: list[ModuleCall], depths: dict[tuple[str, ...], int]) -> str | None:
    """Return the path of the parameter whose gradient is not finite and whose module was called last.

    Parameters that a scan stacks have the index of their layer after the path.
    """
    call_indices: dict[tuple[str, ...], list[int]] = {}
    for i, call in enumerate(calls):
        call_indices.setdefault(call.path, []).append(i)
    candidates: list[tuple[int, str]] = []
    for keys, leaf in jax.tree_util.tree_flatten_with_path(grads)[0]:
        path = checksum.path_string(keys)
        names = tuple(path.split('/'))
        # The call of the whole model always ends last: its own parameters are put first, with index -1.
        indices = call_indices.get(names[:-1], [-1]) if len(names) > 1 else [-1]
        is_finite = np.isfinite(np.asarray(leaf, np.float32))
        if depths.get(names, leaf.ndim) < leaf.ndim:
            layers = len(leaf)
            calls_per_layer = max(len(indices) // layers, 1)
            candidates += [(indices[min((layer + 1) * calls_per_layer, len(indices)) - 1], f'{path}[{layer}]')
                           for layer in range(layers) if not is_finite[layer].all()]  # fmt: skip
        elif not is_finite.all():
            candidates.append((indices[-1], path))
    return max(candidates)[1] if candidates else None


def _float_leaves(tree: Any) -> list[Any]:
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array | np.ndarray)]
    return [x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)]


def _all_finite(tree: Any) -> Any:
    """Return whether all floating-point arrays of a tree are finite; True if there are none."""
    return precision.all_finite(_float_leaves(tree)) if _float_leaves(tree) else np.True_


def _is_finite_leaf(leaf: Any) -> bool:
    return not _float_leaves(leaf) or bool(_all_finite(leaf))
