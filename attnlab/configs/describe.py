"""All fields of a config as text: value, type or allowed values, description."""

import typing
from collections.abc import Iterator
from typing import Any

from attnlab.configs.fields import Field, Section, describe_bounds, fields_of, section_class
from attnlab.configs.tasks import TASKS


def config_table(cls: type[Section], config: Any) -> str:
    """The lines of `attnlab config`: every field of a config that has them all."""
    rows = [
        (key, _shown(value), describe_field_type(field), field.doc) for key, field, value in _values(cls, config, '')
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return '\n'.join(f'{key:<{widths[0]}}  {value:<{widths[1]}}  {doc} ({what})' for key, value, what, doc in rows)


def config_markdown() -> str:
    """`docs/configs.md`: a table for each dataclass of each task's config; a field stands in the first that has it."""
    lines = [
        '# Config fields', '',
        'Written by `python -m attnlab.configs.describe > docs/configs.md` from the dataclasses in `attnlab/configs/`.',
    ]  # fmt: skip
    seen: set[tuple[str, str]] = set()
    for task, (cls, _) in TASKS.items():
        lines += ['', f'## {task}: {_title(cls)}']
        for title, section in _sections(cls):
            fields = [each for each in fields_of(section) if not each.sections]
            known = [each for each in fields if (each.name, each.doc) in seen]
            fresh = [each for each in fields if each not in known and len(each.allowed(load_choices=False)) != 1]
            seen |= {(each.name, each.doc) for each in fields}
            if not fresh:
                continue
            lines += ['', f'### {title}: {_title(section)}'] if title else []
            lines += ['', '| field | default | values | |', '| --- | --- | --- | --- |']
            lines += [
                f'| `{each.name}` | `{_shown(each.default)}` | {describe_field_type(each)} | {each.doc} |'
                for each in fresh
            ]
            if names := [f'`{each.name}`' for each in known if each.name != 'name']:
                lines += ['', f'Also, as in tables above: {", ".join(names)}.']
    return '\n'.join(lines) + '\n'


def describe_field_type(field: Field) -> str:
    """Type, allowed values and bounds of a field, in words."""
    if allowed := field.allowed():
        return ', '.join(str(value) for value in allowed)
    inner = typing.get_args(field.kind)
    name = f'tuple of {inner[0].__name__}' if inner else field.kind.__name__
    return ', '.join(filter(None, [name, describe_bounds(field)]))


def _values(cls: type[Section], config: Any, above: str) -> Iterator[tuple[str, Field, Any]]:
    for field in fields_of(cls):
        value = config[field.name]
        if field.sections:
            yield from _values(section_class(field, value, above), value, f'{above}{field.name}.')
        else:
            yield above + field.name, field, value


def _sections(cls: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    yield '', cls
    for field in fields_of(cls):
        for section in field.sections:
            named = {one: name for name, one in field.by_name.items()} if len(field.sections) > 1 else {}
            yield f'`{field.name}`' + (f', name `{named[section]}`' if named else ''), section


def _title(cls: type[Section]) -> str:
    return (cls.__doc__ or '').splitlines()[0].rstrip('.')


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) or "''"


if __name__ == '__main__':
    print(config_markdown(), end='')
