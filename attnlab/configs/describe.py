"""The fields of a config as text: value, type or allowed values, and description."""

import typing
from collections.abc import Iterator
from typing import Any

from attnlab.configs.fields import Field, Section, describe_bounds, fields_of, section_class
from attnlab.configs.tasks import TASKS


def config_table(cls: type[Section], config: Any) -> str:
    """Return the output of `attnlab config`: one line for each field.  config: has all fields of its dataclass."""
    rows = [
        (key, _format_value(value), describe_field_type(field), field.doc)
        for key, field, value in _values(cls, config, '')
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return '\n'.join(f'{key:<{widths[0]}}  {value:<{widths[1]}}  {doc} ({kind})' for key, value, kind, doc in rows)


def config_markdown() -> str:
    """Return the text of `docs/configs.md`: a table for each dataclass of each task's config.

    A field that several dataclasses have is described in the first of their tables.
    """
    lines = [
        '# Config fields', '',
        'Written by `python -m attnlab.configs.describe > docs/configs.md` from the dataclasses in `attnlab/configs/`.',
    ]  # fmt: skip
    seen: set[tuple[str, str]] = set()
    for task, (cls, _) in TASKS.items():
        lines += ['', f'## {task}: {_title(cls)}']
        for title, section in _sections(cls):
            fields = [field for field in fields_of(section) if not field.sections]
            described = [field for field in fields if (field.name, field.doc) in seen]
            new = [field for field in fields if field not in described and len(field.allowed(load_choices=False)) != 1]
            seen |= {(field.name, field.doc) for field in fields}
            if not new:
                continue
            lines += ['', f'### {title}: {_title(section)}'] if title else []
            lines += ['', '| field | default | values | |', '| --- | --- | --- | --- |']
            lines += [
                f'| `{field.name}` | `{_format_value(field.default)}` | {describe_field_type(field)} | {field.doc} |'
                for field in new
            ]
            if names := [f'`{field.name}`' for field in described if field.name != 'name']:
                lines += ['', f'Also, as in tables above: {", ".join(names)}.']
    return '\n'.join(lines) + '\n'


def describe_field_type(field: Field) -> str:
    """Return the type, or the allowed values, and the bounds of a field in words."""
    if allowed := field.allowed():
        return ', '.join(str(value) for value in allowed)
    inner = typing.get_args(field.kind)
    name = f'tuple of {inner[0].__name__}' if inner else field.kind.__name__
    return ', '.join(filter(None, [name, describe_bounds(field)]))


def _values(cls: type[Section], config: Any, prefix: str) -> Iterator[tuple[str, Field, Any]]:
    for field in fields_of(cls):
        value = config[field.name]
        if field.sections:
            yield from _values(section_class(field, value, prefix), value, f'{prefix}{field.name}.')
        else:
            yield prefix + field.name, field, value


def _sections(cls: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    yield '', cls
    for field in fields_of(cls):
        for section in field.sections:
            names = {inner: name for name, inner in field.by_name.items()} if len(field.sections) > 1 else {}
            yield f'`{field.name}`' + (f', name `{names[section]}`' if names else ''), section


def _title(cls: type[Section]) -> str:
    return (cls.__doc__ or '').splitlines()[0].rstrip('.')


def _format_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) or "''"


if __name__ == '__main__':
    print(config_markdown(), end='')
