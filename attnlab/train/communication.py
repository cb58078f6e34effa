"""What a config costs on a mesh, without its devices: the bytes of each one, and what a step sends between them."""

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
    """Of one kind of collective: how often a step has it, and the bytes that a device gets from it in a step."""

    kind: str
    times: int
    bytes: int


def count_communication(config: RunConfig | ConfigDict, mesh: str) -> tuple[dict[str, int], list[CollectiveCost]]:
    """The bytes that lie on one device, by name, and the collectives of a step, as XLA divides it for CPUs.

    The step is the gradient of the sum of all logits for one (micro-)batch, and the optimizer's update.  Compilers for
    other devices fuse more (a sum of which each uses a part is a reduce-scatter).  As many devices as the mesh has must
    be there, of any kind; nothing is allocated on them.

    Raises UserError for a mesh that does not divide the batch.
    """
    task = tasks.create_task(config)
    outline = require_support(task, SupportsOutline, 'have a model that can be counted').outline(None, False)
    train = replace(task.config.train, mesh=mesh, parallel='jit')
    setup = make_setup(replace(task.config, train=train), examples=1)
    layout = setup.layout
    assert isinstance(layout, devices.JitLayout)
    rows = train.batch_size // train.accumulate

    def started(params: Params) -> TrainState:
        return setup.initial(lambda rng: params, np.uint32(0))

    def step(state: TrainState, batch: Batch) -> TrainState:
        grads = jax.grad(lambda params: jnp.sum(outline.forward(params, *batch)))(state.params)
        updates, memory = setup.optimize(1e-3, 0.1).update(grads, state.optimizer, state.params)
        return state._replace(params=optax.apply_updates(state.params, updates), optimizer=memory)

    def row(x: Any) -> jax.ShapeDtypeStruct:
        shape = (rows, *x.shape[1:])
        where = NamedSharding(layout.mesh, devices.batch_spec(shape, layout.mesh))
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=where)

    state = layout.stored(jax.eval_shape(started, outline.params))
    places = jax.tree.map(lambda x: x.sharding, state)
    with jax.set_mesh(layout.mesh):
        program = jax.jit(step, donate_argnums=0, out_shardings=places).lower(state, tuple(map(row, outline.batch)))
    held = {'parameters': state.params, 'gradients': state.params, "optimizer's state": state.optimizer}
    held = {name: device_bytes(tree) for name, tree in held.items()}
    if state.average is not None:
        held['average'] = device_bytes(state.average)
    return held, parse_collectives(program.compile().as_text() or '')


def parse_collectives(program: str) -> list[CollectiveCost]:
    """The collectives of a compiled program, from its text; those in a loop as often as it turns.

    Raises ValueError for a loop with collectives in it whose turns are not known.
    """
    bodies, entry = _computations(program)

    def of(name: str) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for line in bodies[name]:
            if match := re.search(rf' ({"|".join(COLLECTIVES)})(-start)?\(', line):
                _add(found, match[1], 1, _bytes(line[: match.start()]))
            turns = _turns(line)
            for inner in _called(line):
                for kind, (times, size) in of(inner).items():
                    if turns is None:
                        raise ValueError(f'{kind} in a loop that turns as often as values say')
                    _add(found, kind, times * turns, size * turns)
        return found

    return [CollectiveCost(kind, *numbers) for kind, numbers in sorted(of(entry).items())]


def _add(found: dict[str, tuple[int, int]], kind: str, times: int, size: int) -> None:
    before = found.get(kind, (0, 0))
    found[kind] = before[0] + times, before[1] + size


def _computations(program: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation by its name, and the name of the one that is run."""
    bodies: dict[str, list[str]] = {}
    name = entry = ''
    for line in program.splitlines():
        if match := re.match(r'(ENTRY )?%([\w.-]+) .*\{$', line):
            name = match[2]
            bodies[name] = []
            entry = name if match[1] else entry
        elif name:
            bodies[name].append(line)
    return bodies, entry


def _called(line: str) -> list[str]:
    """The computations that a line runs; of a branch, all."""
    one = re.findall(r'(?:body|condition|calls|to_apply|true_computation|false_computation)=%([\w.-]+)', line)
    several = re.search(r'branch_computations=\{([^}]*)\}', line)
    return one + (re.findall(r'%([\w.-]+)', several[1]) if several else [])


def _turns(line: str) -> int | None:
    """How often what a line calls is run; None for a loop that does not say."""
    if ' while(' not in line:
        return 1
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
    return int(known[1]) if known else None


def _bytes(result: str) -> int:
    """Of the shapes in a line's text before the operation."""
    shapes = re.findall(r'(\w+)\[([\d,]*)\]', result)
    return sum(DTYPE_BYTES[kind] * math.prod(map(int, filter(None, sizes.split(',')))) for kind, sizes in shapes)


def format_communication(held: dict[str, int], sent: list[CollectiveCost]) -> str:
    """Both as text."""
    lines = [f'{"on each device":<36}{"bytes":>22}']
    lines += [f'{name:<36}{size:>22,}' for name, size in [*held.items(), ('together', sum(held.values()))]]
    lines += ['', f'{"a step sends":<36}{"times":>22}{"bytes to each device":>22}']
    lines += [f'{kind:<36}{times:>22,}{size:>22,}' for kind, times, size in sent]
    return '\n'.join(lines if sent else [*lines, 'nothing'])
