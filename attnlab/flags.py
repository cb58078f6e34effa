"""What a command takes, and its command line read: whatever it does not take is refused in one line."""

import argparse
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from attnlab import files
from attnlab.errors import UserError


@dataclass(frozen=True)
class Flag:
    name: str
    metavar: str  # '' for a switch
    help: str
    needed: bool = False


@dataclass(frozen=True)
class Command:
    run: Callable[[argparse.Namespace], int | None]  # the exit code, None for success
    summary: str
    flags: tuple[Flag, ...] = ()
    words: str = ''  # what its positional arguments are called, '' where it takes none
    overrides: bool = False


def parse(name: str, command: Command, argv: list[str]) -> argparse.Namespace:
    """The flags by name, `words` and `overrides` beside them; whatever else stands there is refused."""
    if '--' in argv:
        raise UserError(f'{name} takes nothing after --, got {" ".join(argv[argv.index("--") :])!r}')
    overrides, rest = _split_overrides(argv) if command.overrides else ([], argv)
    given, unknown = _parser(name, command).parse_known_args(['--help' if token == '-h' else token for token in rest])
    for token in unknown:
        _check_word(name, command, token)
    values = {flag.name: _one(name, flag, getattr(given, flag.name)) for flag in command.flags}
    return argparse.Namespace(**values, words=unknown, overrides=overrides)


def _check_word(name: str, command: Command, token: str) -> None:
    if token.startswith('-') and ' ' not in token:
        raise UserError(f'{name} does not understand {token!r}{_nearest_flag(token, command)}')
    if not command.words:
        override = command.overrides and '=' in token
        hint = f'; did you mean --config.{token.removeprefix("config.")}?' if override else ''
        raise UserError(f'{name} takes only flags, got {token!r}{hint}')


def _one(name: str, flag: Flag, values: list | None) -> Any:
    if not values:
        if flag.needed:
            raise UserError(f'{name} needs --{flag.name}={flag.metavar}')
        return None if flag.metavar else False
    if len(values) > 1:
        raise UserError(f'--{flag.name} is given {len(values)} times; once is expected')
    if values == ['']:
        raise UserError(f'--{flag.name} expects {flag.metavar}, got nothing')
    if flag.metavar not in _PATHS:
        return values[0]
    path = files.expand_home(values[0], f'--{flag.name}')
    if not files.is_utf8(whole := os.path.abspath(path)):  # it is written into pages and tables
        raise UserError(f'--{flag.name} is {whole!r}; expected folders whose names are UTF-8')
    return path


_PATHS = ('DIR', 'FILE', 'FILE.py', 'FILE[:ARG]')
"""What the values are called that are paths."""


def _parser(name: str, command: Command) -> argparse.ArgumentParser:
    words = f' [{command.words} ...]' if command.words else ''
    forms = [f'--{flag.name}={flag.metavar}'.removesuffix('=') for flag in command.flags]
    flags = [form if flag.needed else f'[{form}]' for flag, form in zip(command.flags, forms, strict=True)]
    usage = ' '.join(['attnlab', name, *flags]) + ' [--config.KEY=VALUE ...]' * command.overrides + words
    parser = argparse.ArgumentParser(usage=usage, description=command.summary, allow_abbrev=False, add_help=False)
    parser.error = _refuse
    # Without -h, of which Python 3.12 and later take -h5 for a form: `parse` reads it.
    parser.add_argument('--help', action='help', help='show this help message and exit')
    for flag in command.flags:  # collected in lists, so that one given twice is seen
        if flag.metavar:
            parser.add_argument(f'--{flag.name}', metavar=flag.metavar, action='append', help=flag.help)
        else:
            parser.add_argument(f'--{flag.name}', action='append_const', const=True, help=flag.help)
    return parser


def _refuse(message: str) -> NoReturn:
    raise UserError(message.removeprefix('argument '))


def _split_overrides(argv: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Takes `--config.key=value` and `--config.key value` out of the arguments."""
    overrides, rest, tokens = [], [], iter(argv)
    for token in tokens:
        if not token.startswith('--config.'):
            rest.append(token)
            continue
        key, equals, value = token.removeprefix('--config.').partition('=')
        if not equals and ((value := next(tokens, '--')).startswith('--')):
            raise UserError(f'{token} expects a value: {token}=VALUE')
        overrides.append((key, value))
    return overrides, rest


def _nearest_flag(token: str, command: Command) -> str:
    name = token.lstrip('-')
    if command.overrides and name.startswith('config.'):
        return f'; did you mean --{name}?'
    return nearest('--' + name.partition('=')[0], [f'--{flag.name}' for flag in command.flags] + ['--help'])


def nearest(name: str, names: Sequence[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f'; did you mean {near[0]}?' if near else f'; expected one of {", ".join(names)}'


def number(name: str, text: str | None, kind: type) -> Any:
    """The value of a flag, None where it is not given."""
    if text is None:
        return None
    try:
        value = kind(text)
        if not math.isfinite(value):
            raise ValueError(text)
        return value
    except ValueError:
        expected = 'a whole number' if kind is int else 'a finite number'
        raise UserError(f'--{name} expects {expected}, got {text!r}') from None


def span(name: str, text: str | None) -> tuple[int, int] | None:
    """The first and the last step of a flag such as 10..15, None where it is not given."""
    if text is None:
        return None
    found = re.fullmatch(r'([0-9]{1,18})\.\.([0-9]{1,18})', text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(f'--{name} expects its first and last step, from 1, as in 10..15; got {text!r}')
    return int(found[1]), int(found[2])
