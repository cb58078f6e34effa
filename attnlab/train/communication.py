"""Cost of a config on a device mesh that need not exist: bytes on each device, and communication of a step."""

import math
import re
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from ml_collections import ConfigDict

from attnlab import tasks
from attnlab.configs import RunConfig
from attnlab.tasks.task import Batch, Params, SupportsOutline, require_support
from attnlab.train import devices
from attnlab.train.cost import device_bytes
from attnlab.train.setup import make_setup
from attnlab.train.step import TrainState

COLLECTIVES = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute')

DTYPE_BYTES = {'pred': 1, 's8': 1, 'u8': 1, 's16': 2, 'u16': 2, 'bf16': 2, 'f16': 2, 's32': 4, 'u32': 4, 'f32': 4,
               's64': 8, 'u64': 8, 'f64': 8}  # fmt: skip


class CollectiveCost(NamedTuple):
    """One kind of collective: how often a step runs it, and the bytes that each device receives from it in a step."""

    kind: str
    times: int
    bytes: int


def count_communication(config: RunConfig | ConfigDict, mesh: str) -> tuple[dict[str, int], list[CollectiveCost]]:
    """Return the bytes of each part of the training state on one device, and the collectives of a step.

    The step is the gradient of the sum of all logits for one (micro-)batch, and the optimizer's update.  Its
    collectives are those of XLA's program for CPUs.  Compilers for other devices fuse more of them: a sum of which each
    device uses a part becomes a reduce-scatter.  JAX must have as many devices as the mesh, of any kind; nothing is
    allocated on them.

    Raises UserError if the mesh does not divide the batch.
    """
    task = tasks.create_task(config)
    outline = require_support(task, SupportsOutline, 'have a model that can be counted').outline(None, False)
    train = replace(task.config.train, mesh=mesh, parallel='jit')
    setup = make_setup(replace(task.config, train=train), examples=1)
    layout = setup.layout
    assert isinstance(layout, devices.JitLayout)
    rows = train.batch_size // train.accumulate

    def make_state(params: Params) -> TrainState:
        return setup.initial_state(lambda rng: params, np.uint32(0))

    def step(state: TrainState, batch: Batch) -> TrainState:
        grads = jax.grad(lambda params: jnp.sum(outline.forward(params, *batch)))(state.params)
        updates, opt_state = setup.make_optimizer(1e-3, 0.1).update(grads, state.opt_state, state.params)
        return state._replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state)

    def batch_shape(row: Any) -> jax.ShapeDtypeStruct:
        shape = (rows, *row.shape[1:])
        sharding = NamedSharding(layout.mesh, devices.batch_spec(shape, layout.mesh))
        return jax.ShapeDtypeStruct(shape, row.dtype, sharding=sharding)

    state = layout.stored_shapes(jax.eval_shape(make_state, outline.params))
    shardings = jax.tree.map(lambda x: x.sharding, state)
    batch = tuple(map(batch_shape, outline.batch))
    with jax.set_mesh(layout.mesh):
        program = jax.jit(step, donate_argnums=0, out_shardings=shardings).lower(state, batch)
    trees = {'parameters': state.params, 'gradients': state.params, 'optimizer state': state.opt_state}
    if state.ema_params is not None:
        trees['moving average'] = state.ema_params
    bytes_by_part = {name: device_bytes(tree) for name, tree in trees.items()}
    return bytes_by_part, parse_collectives(program.compile().as_text() or '')


def parse_collectives(program: str) -> list[CollectiveCost]:
    """Return the collectives in the text of a compiled program; those in a loop count once for each iteration.

    Raises ValueError if a loop with collectives has an unknown number of iterations.
    """
    computations, entry = _split_computations(program)

    def count(name: str) -> dict[str, tuple[int, int]]:
        """Return (times, bytes) of each kind of collective in a computation."""
        costs: dict[str, tuple[int, int]] = {}
        for line in computations[name]:
            if match := re.search(rf' ({"|".join(COLLECTIVES)})(-start)?\(', line):
                _add_cost(costs, match[1], 1, _result_bytes(line[: match.start()]))
            iterations = _iterations(line)
            for called in _called_computations(line):
                for kind, (times, size) in count(called).items():
                    if iterations is None:
                        raise ValueError(f'{kind} in a loop whose number of iterations is not known at compile time')
                    _add_cost(costs, kind, times * iterations, size * iterations)
        return costs

    return [CollectiveCost(kind, *numbers) for kind, numbers in sorted(count(entry).items())]


def _add_cost(costs: dict[str, tuple[int, int]], kind: str, times: int, size: int) -> None:
    old_times, old_size = costs.get(kind, (0, 0))
    costs[kind] = old_times + times, old_size + size


def _split_computations(program: str) -> tuple[dict[str, list[str]], str]:
    """Return the lines of each computation by its name, and the name of the entry computation."""
    computations: dict[str, list[str]] = {}
    name = entry = ''
    for line in program.splitlines():
        if match := re.match(r'(ENTRY )?%([\w.-]+) .*\{$', line):
            name = match[2]
            computations[name] = []
            entry = name if match[1] else entry
        elif name:
            computations[name].append(line)
    return computations, entry


def _called_computations(line: str) -> list[str]:
    """Return the names of the computations that a line calls; for a conditional, all of its branches."""
    names = re.findall(r'(?:body|condition|calls|to_apply|true_computation|false_computation)=%([\w.-]+)', line)
    branches = re.search(r'branch_computations=\{([^}]*)\}', line)
    return names + (re.findall(r'%([\w.-]+)', branches[1]) if branches else [])


def _iterations(line: str) -> int | None:
    """Return how often the computations that a line calls are run; None for a loop without a known number."""
    if ' while(' not in line:
        return 1
    match = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
    return int(match[1]) if match else None


def _result_bytes(result: str) -> int:
    """Return the bytes of all shapes in the part of a line before its operation."""
    shapes = re.findall(r'(\w+)\[([\d,]*)\]', result)
    return sum(DTYPE_BYTES[dtype] * math.prod(map(int, filter(None, sizes.split(',')))) for dtype, sizes in shapes)


def format_communication(bytes_by_part: dict[str, int], collectives: list[CollectiveCost]) -> str:
    """Return the results of `count_communication` as a text table."""
    total = sum(bytes_by_part.values())
    lines = [f'{"on each device":<36}{"bytes":>22}']
    lines += [f'{name:<36}{size:>22,}' for name, size in [*bytes_by_part.items(), ('total', total)]]
    lines += ['', f'{"communication of a step":<36}{"times":>22}{"bytes to each device":>22}']
    lines += [f'{kind:<36}{times:>22,}{size:>22,}' for kind, times, size in collectives]
    return '\n'.join(lines if collectives else [*lines, 'none'])
