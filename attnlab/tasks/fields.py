"""Name and type of every config field, and the check of a config against them.

One table for all tasks, until configs are typed dataclasses.  A test holds that each field is one of an experiment, and
tests/test_experiments.py that the code reads each field of every experiment.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from attnlab.config import nearest_key
from attnlab.errors import UserError
from attnlab.tasks import transformer, vit

Kind = type | tuple[type]
"""The type of a value; (int,) for a tuple of ints of any length."""

LARGEST = 2**53
"""An int serves for a float up to here: every smaller one is a float exactly."""


class Section(NamedTuple):
    """Fields of a section by name.  optional: with a default in the code.

    by_name: the fields that each value of the section's own field `name` needs besides.  A section may also have the
    fields of another name: `--config.data.name=...` changes the name alone.
    """

    needed: Mapping[str, Kind]
    optional: Mapping[str, Kind] = {}
    by_name: Mapping[str, Mapping[str, Kind]] = {}

    def known(self) -> dict[str, Kind]:
        """All fields that the section may have."""
        every: dict[str, Kind] = {**self.needed, **self.optional}
        for fields in self.by_name.values():
            every |= {'name': str, **fields}
        return every


def _kinds(defaults: Mapping[str, Any]) -> dict[str, Kind]:
    return {name: (type(value[0]),) if isinstance(value, tuple) else type(value) for name, value in defaults.items()}


_DRAWN: dict[str, Kind] = dict(train_examples=int, test_examples=int)
_CIFAR: dict[str, Kind] = dict(folder=str, held_out=int)

TOP: dict[str, Kind] = dict(task=str, seed=int)
TOP_OPTIONAL: dict[str, Kind] = dict(start=str)

COMMON = {
    'optimizer': Section(
        dict(name=str, b2=float, learning_rate=float, schedule=str, warmup=str, clip=float, weight_decay=float),
        dict(layer_decay=float),
    ),
    'train': Section(
        dict(
            batch_size=int, accumulate=int, duration=str, log_every=str, eval_every=str, save_every=str, patience=int,
            label_smoothing=float,
        ),
        dict(mesh=str, parallel=str, ema=float),
    ),
}  # fmt: skip
"""The sections that every task has."""

TASKS = {
    'align': {
        'data': Section(
            dict(vocabulary=str, vocabulary_size=int, shared=bool, widths=(int,)),
            by_name={
                'grammar': _DRAWN,
                'multi30k': dict(folder=str),
                'files': dict(languages=(str,), train=str, valid=str, test=str),
            },
        ),
        'model': Section(
            {},
            by_name={
                'recurrent': dict(
                    cell=str, attention=str, embedding=int, hidden=int, original=bool, encoder_layers=int,
                    bidirectional=bool, reverse_source=bool, dropout=float,
                ),
                'transformer': dict(
                    shared_embedding=bool, alignment_layer=int, alignment_shift=int, **_kinds(transformer.FIELDS)
                ),
            },
        ),
        'decode': Section(dict(beams=int, length_penalty=float)),
    },
    'language': {
        'data': Section(
            dict(documents=str, vocabulary=str, vocabulary_size=int),
            by_name={
                'shakespeare': dict(folder=str, share=float),
                'file': dict(path=str, share=float),
                'grammar': _DRAWN,
            },
        ),
        'model': Section({}, by_name={'language': dict(tied=bool, **_kinds(transformer.FIELDS))}),
    },
    'vision': {
        'data': Section(
            dict(
                crop=int, flip=bool, policy=str, operations=int, strength=float, erase=float, mixup=float, cutmix=float
            ),
            by_name={
                'cifar10': _CIFAR,
                'cifar100': _CIFAR,
                'digits': _DRAWN,
                'files': dict(train=str, test=str, held_out=int, shape=(int,), classes=int),
            },
        ),
        'model': Section(
            {}, by_name={'vit': _kinds(vit.FIELDS), 'resnet': dict(image=(int,), width=int, blocks=int)}
        ),
    },
}  # fmt: skip
"""The other sections of each task."""


def check(config: Any) -> None:
    """Raises UserError for a field that no code reads, one that is missing and a value of another type."""
    _check_types('', config, TOP | TOP_OPTIONAL)
    _check_present('', config, TOP)
    if config.task not in TASKS:
        raise UserError(f'task is {config.task!r}; expected {_listed(TASKS)}')
    sections = COMMON | TASKS[config.task]
    known = [*TOP, *TOP_OPTIONAL, *sections]
    known += [f'{name}.{field}' for name, section in sections.items() for field in section.known()]
    for key in _keys(config):
        if key not in known:
            raise UserError(f'there is no config.{key}{nearest_key(key, known)}')
    for name, section in sections.items():
        if name not in config:
            raise UserError(f'config has no {name}; expected a section with the fields {", ".join(section.known())}')
        if not isinstance(config[name], ConfigDict):
            raise UserError(f'config.{name} is {config[name]!r}; expected a section')
        _check_section(name, config[name], section)


def _keys(config: Any) -> Iterator[str]:
    """Dotted keys of the sections and their fields."""
    for name, value in config.items():
        yield name
        if isinstance(value, ConfigDict):
            yield from (f'{name}.{field}' for field in value)


def _check_section(name: str, section: Any, fields: Section) -> None:
    _check_types(f'{name}.', section, fields.known())
    _check_present(f'{name}.', section, fields.needed)
    if not fields.by_name:
        return
    _check_present(f'{name}.', section, {'name': str})
    if section.name not in fields.by_name:
        raise UserError(f'{name}.name is {section.name!r}; expected {_listed(fields.by_name)}')
    for field in fields.by_name[section.name]:
        if field not in section:
            asked = f'{name}.name is {section.name!r}, which asks for {name}.{field}'
            raise UserError(f'{asked}; the config has no such field')


def _check_present(above: str, section: Any, kinds: Mapping[str, Kind]) -> None:
    """above: '' for the whole config, 'model.' for that section."""
    for field, kind in kinds.items():
        if field not in section:
            raise UserError(f'config has no {above}{field}; expected {_described(kind)}')


def _check_types(above: str, section: Any, kinds: Mapping[str, Kind]) -> None:
    for field, kind in kinds.items():
        if field in section and not _fits(section[field], kind):
            raise UserError(f'config.{above}{field} is {_shown(section[field])}; expected {_described(kind)}')


def _fits(value: Any, kind: Kind) -> bool:
    if isinstance(kind, tuple):
        return type(value) is tuple and all(_fits(each, kind[0]) for each in value)
    if kind is float and type(value) is int:
        return abs(value) <= LARGEST
    return type(value) is kind and (kind is not float or math.isfinite(value))  # exactly: a bool is an int


def _described(kind: Kind) -> str:
    if isinstance(kind, tuple):
        return f'a tuple of {kind[0].__name__}'
    return {bool: 'true or false', int: 'an int', float: 'a finite float', str: 'a str'}[kind]


def _shown(value: Any) -> str:
    return 'a section' if isinstance(value, ConfigDict) else repr(value)


def _listed(names: Mapping[str, Any]) -> str:
    *front, last = map(repr, names)
    return f'{", ".join(front)} or {last}' if front else last
