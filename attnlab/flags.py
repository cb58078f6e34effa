"""Flags of the commands, and the parser of a command line; anything unknown raises UserError."""

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
    """A flag of a command: `--name=metavar`, or a switch `--name` if metavar is ''."""

    name: str
    metavar: str
    help: str
    required: bool = False


@dataclass(frozen=True)
class Command:
    """A command.

    run: takes the flags and returns the exit code, None for success.  summary: its line of `attnlab --help`.
    words: the name of its positional arguments in the usage line, '' if it takes none.
    overrides: whether it takes `--config.key=value`.
    """

    run: Callable[[argparse.Namespace], int | None]
    summary: str
    flags: tuple[Flag, ...] = ()
    words: str = ''
    overrides: bool = False


def parse(name: str, command: Command, argv: list[str]) -> argparse.Namespace:
    """Parse the arguments of a command.

    Returns its flags by name (None or False if absent), `words` (the positional arguments) and `overrides`, a list of
    (key, value).  Raises UserError for anything that the command does not take.
    """
    if '--' in argv:
        raise UserError(f'{name} takes nothing after --, got {" ".join(argv[argv.index("--") :])!r}')
    overrides, rest = _split_overrides(argv) if command.overrides else ([], argv)
    values, unknown = _parser(name, command).parse_known_args(['--help' if token == '-h' else token for token in rest])
    for token in unknown:
        _check_word(name, command, token)
    flags = {flag.name: _flag_value(name, flag, getattr(values, flag.name)) for flag in command.flags}
    return argparse.Namespace(**flags, words=unknown, overrides=overrides)


def _check_word(name: str, command: Command, token: str) -> None:
    if token.startswith('-') and ' ' not in token:
        raise UserError(f'{name} does not understand {token!r}{_nearest_flag(token, command)}')
    if not command.words:
        override = command.overrides and '=' in token
        hint = f'; did you mean --config.{token.removeprefix("config.")}?' if override else ''
        raise UserError(f'{name} takes only flags, got {token!r}{hint}')


def _flag_value(name: str, flag: Flag, values: list | None) -> Any:
    if not values:
        if flag.required:
            raise UserError(f'{name} needs --{flag.name}={flag.metavar}')
        return None if flag.metavar else False
    if len(values) > 1:
        raise UserError(f'--{flag.name} is given {len(values)} times; expected once')
    if values == ['']:
        raise UserError(f'--{flag.name} expects {flag.metavar}, got nothing')
    if flag.metavar not in _PATHS:
        return values[0]
    path = files.expand_home(values[0], f'--{flag.name}')
    if not files.is_utf8(absolute := os.path.abspath(path)):  # pages and tables contain the path
        raise UserError(f'--{flag.name} is {absolute!r}; expected folders whose names are UTF-8')
    return path


_PATHS = ('DIR', 'FILE', 'FILE.py', 'FILE[:ARG]')
"""Metavars of flags whose value is a path."""


def _parser(name: str, command: Command) -> argparse.ArgumentParser:
    words = f' [{command.words} ...]' if command.words else ''
    forms = [f'--{flag.name}={flag.metavar}'.removesuffix('=') for flag in command.flags]
    flags = [form if flag.required else f'[{form}]' for flag, form in zip(command.flags, forms, strict=True)]
    usage = ' '.join(['attnlab', name, *flags]) + ' [--config.KEY=VALUE ...]' * command.overrides + words
    parser = argparse.ArgumentParser(usage=usage, description=command.summary, allow_abbrev=False, add_help=False)
    parser.error = _refuse
    # No -h here, because Python 3.12 and later would accept -h5: `parse` turns -h into --help.
    parser.add_argument('--help', action='help', help='show this help message and exit')
    for flag in command.flags:  # lists, so that a repeated flag is noticed
        if flag.metavar:
            parser.add_argument(f'--{flag.name}', metavar=flag.metavar, action='append', help=flag.help)
        else:
            parser.add_argument(f'--{flag.name}', action='append_const', const=True, help=flag.help)
    return parser


def _refuse(message: str) -> NoReturn:
    raise UserError(message.removeprefix('argument '))


def _split_overrides(argv: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Split `--config.key=value` and `--config.key value` from the other arguments."""
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
    """Return the end of an error about an unknown name: the most similar name or, if none is similar, all of them."""
    import difflib

    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f'; did you mean {near[0]}?' if near else f'; expected one of {", ".join(names)}'


def number(name: str, text: str | None, kind: type) -> Any:
    """Return the value of a flag as an int or a finite float; None if the flag is absent."""
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
    """Return the first and the last step of a flag such as 10..15; None if the flag is absent."""
    if text is None:
        return None
    match = re.fullmatch(r'([0-9]{1,18})\.\.([0-9]{1,18})', text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f'--{name} expects its first and last step, from 1, as in 10..15; got {text!r}')
    return int(match[1]), int(match[2])
