"""The commands: flags in, exit code out.  0 is success, 1 a run that cannot go on and 2 a
user's mistake, each told in one line, 130 an interrupt.

Nothing heavy is imported here: a command imports what it runs once its command line is understood.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from attnlab.errors import RunError, UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns the exit code."""
    try:
        _dispatch(list(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        print('attnlab:', ' '.join(str(error).splitlines()), file=sys.stderr)
        return 2
    except RunError as error:
        print('attnlab:', error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print('attnlab: interrupted', file=sys.stderr)
        return 130
    return 0


def _dispatch(argv: list[str]) -> None:
    match argv:
        case ['-h' | '--help' | 'help', *_]:
            print(_help())
        case ['--version']:
            from attnlab import __version__

            print('attnlab', __version__)
        case [name, *rest] if name in _COMMANDS:
            _COMMANDS[name].run(_parse(name, rest))
        case [name, *_]:
            raise UserError(f'there is no command {name!r}{_nearest(name, [*_COMMANDS, "--help", "--version"])}')
        case _:
            raise UserError(f'a command is missing: one of {", ".join(_COMMANDS)}; attnlab --help tells more')


# The commands


def _prepare() -> None:
    """Log lines of ours on the screen, and compiled programs kept from one start to the next."""
    import logging
    import os

    logging.basicConfig(level=logging.INFO, format='%(message)s')
    for library in ('absl', 'jax', 'orbax'):
        logging.getLogger(library).setLevel(logging.WARNING)
    cache = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'attnlab' / 'jax'
    os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(cache))
    # JAX keeps only what took it a second; half of a small experiment's start is programs below that.
    os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.1')


def _train(given: argparse.Namespace) -> None:
    from attnlab import config as configs

    config = configs.load(given.config, given.overrides)
    workdir = Path(given.workdir)
    for folder in (workdir, *workdir.parents):
        if folder.exists() and not folder.is_dir():
            raise UserError(f'--workdir={workdir}: {folder} is a file, expected a folder')

    _prepare()
    from attnlab.train import run

    done = run.train(config, workdir)
    print('trained,', ', '.join(f'{name} {value:.6g}' for name, value in done.items()))


def _eval(given: argparse.Namespace) -> None:
    workdir = _run_directory(given.workdir)

    _prepare()
    from attnlab.report import page, screen
    from attnlab.train import run

    split, scores = run.evaluate(workdir, given.split)
    print(screen.scores(scores))
    print(f'page: {page.run_page(workdir, split)}')


def _translate(given: argparse.Namespace) -> None:
    workdir = _run_directory(given.workdir)
    layer = _number('layer', given.layer, int)
    sentences = given.words or _piped_sentences()
    for number, sentence in enumerate(sentences, 1):
        if not sentence.strip():
            raise UserError(f'sentence {number} is empty')

    _prepare()
    from attnlab import tasks
    from attnlab.train import run

    translate = tasks.able(run.config(workdir), 'translate')
    loaded = run.load(workdir)
    reading = {'joined': given.joined, 'layer': layer, 'shifted': given.shifted}
    translate(loaded.config, workdir, loaded.params, sentences, **reading)


def _generate(given: argparse.Namespace) -> None:
    workdir = _run_directory(given.workdir)
    numbers = {name: _number(name, getattr(given, name), kind) for name, kind in _GENERATED.items()}

    _prepare()
    from attnlab import tasks
    from attnlab.train import run

    generate = tasks.able(run.config(workdir), 'generate')
    loaded = run.load(workdir)
    chosen = {name: number for name, number in numbers.items() if number is not None}
    generate(loaded.config, workdir, loaded.params, given.prompt or '', **chosen)


_GENERATED = {'tokens': int, 'samples': int, 'seed': int, 'temperature': float, 'top_k': int, 'top_p': float}


def _attend(given: argparse.Namespace) -> None:
    workdir = _run_directory(given.workdir)
    layer, head = (_number(name, getattr(given, name), int) for name in ('layer', 'head'))
    texts = given.words
    if not texts or not all(text.strip() for text in texts):
        raise UserError('attend expects a text in quotes, or several')

    _prepare()
    from attnlab import tasks
    from attnlab.train import run

    attend = tasks.able(run.config(workdir), 'attend')
    loaded = run.load(workdir)
    attend(loaded.config, workdir, loaded.params, texts, layer=layer, head=head)


def _count(given: argparse.Namespace) -> None:
    from attnlab import config as configs

    config = configs.load(given.config, given.overrides)

    _prepare()
    from attnlab.train import count

    print(count.table(*count.count(config)))


def _number(name: str, text: str | None, kind: type) -> Any:
    """The value of a flag, None where it is not given."""
    if text is None:
        return None
    try:
        return kind(text)
    except ValueError:
        expected = 'a whole number' if kind is int else 'a number'
        raise UserError(f'--{name} expects {expected}, got {text!r}') from None


def _aer(given: argparse.Namespace) -> None:
    from attnlab.data import alignments

    scores = alignments.aer(given.gold, given.links, given.swap)
    print(f'AER {scores.aer:.4f}  precision {scores.precision:.4f}  recall {scores.recall:.4f}')


def _bench(given: argparse.Namespace) -> None:
    import importlib

    if len(given.words) > 1:
        raise UserError(f'bench takes one of {", ".join(_BENCHES)}, got {" ".join(given.words)!r}')
    for name in given.words:
        if name not in _BENCHES:
            raise UserError(f'there is no bench {name!r}{_nearest(name, _BENCHES)}')
    for name in given.words or _BENCHES:
        importlib.import_module(f'attnlab.bench.{name}').main()


_BENCHES = ('seq2seq', 'attention', 'lm')


@dataclass(frozen=True)
class _Flag:
    name: str
    metavar: str  # '' for a switch
    help: str
    needed: bool = False


@dataclass(frozen=True)
class _Command:
    run: Callable[[argparse.Namespace], None]
    summary: str
    flags: tuple[_Flag, ...] = ()
    words: str = ''  # what its positional arguments are called, '' where it takes none
    overrides: bool = False


_A_RUN = _Flag('workdir', 'DIR', 'the directory of a trained run', needed=True)

_COMMANDS = {
    'train': _Command(
        _train,
        'trains an experiment; run again, it goes on where it stopped',
        (
            _Flag('config', 'FILE[:ARG]', 'experiment file with get_config(arg), and its argument', needed=True),
            _Flag('workdir', 'DIR', 'where everything about the run is written', needed=True),
        ),
        overrides=True,
    ),
    'eval': _Command(
        _eval,
        'scores a run, every example once',
        (
            _A_RUN,
            _Flag('split', 'NAME', 'which split of its data (default: test, or valid where there is none)'),
        ),
    ),
    'translate': _Command(
        _translate,
        'prints the French and draws its alignment; sentences also come from a pipe, one a line',
        (
            _A_RUN,
            _Flag('joined', '', 'draw words, not sub-words'),
            _Flag('layer', 'N', "a Transformer's alignment is that of this layer, from 1 (default: its config's)"),
            _Flag('shifted', '', 'read it one step later, where a word is fed'),
        ),
        words='SENTENCE',
    ),
    'generate': _Command(
        _generate,
        'lets a language model go on from a prompt',
        (
            _A_RUN,
            _Flag('prompt', 'TEXT', 'what it goes on from'),
            _Flag('tokens', 'N', 'how many to add at most (default: 200)'),
            _Flag('samples', 'N', 'how many texts (default: 1)'),
            _Flag('seed', 'N', 'of the draws (default: 0)'),
            _Flag('temperature', 'X', '0 takes the likeliest token (default: 1)'),
            _Flag('top_k', 'K', 'draws from the K likeliest tokens only'),
            _Flag('top_p', 'P', 'draws from the likeliest tokens that have probability P together'),
        ),
    ),
    'attend': _Command(
        _attend,
        'draws the attention of every layer and head over a text',
        (
            _A_RUN,
            _Flag('layer', 'N', 'draw this layer alone, from 1'),
            _Flag('head', 'N', 'draw this head alone, from 1'),
        ),
        words='TEXT',
    ),
    'count': _Command(
        _count,
        'parameters, FLOP and memory of a config, layer by layer, with nothing allocated',
        (_Flag('config', 'FILE[:ARG]', 'experiment file with get_config(arg), and its argument', needed=True),),
        overrides=True,
    ),
    'aer': _Command(
        _aer,
        "alignment error rate, precision and recall of any aligner's links",
        (
            _Flag('gold', 'FILE', 'gold alignments, NAACL 2003 or Pharaoh format', needed=True),
            _Flag('links', 'FILE', "an aligner's output, either format", needed=True),
            _Flag('swap', '', 'the links name the target first'),
        ),
    ),
    'bench': _Command(
        _bench,
        f'our steps beside those one would pick instead: {", ".join(_BENCHES)} (default: all)',
        words='WHAT',
    ),
}


def _help() -> str:
    commands = '\n'.join(f'  {name:<10} {command.summary}' for name, command in _COMMANDS.items())
    return f"""usage: attnlab COMMAND [--flag=value ...]

{commands}

attnlab COMMAND --help lists the flags of a command; attnlab --version prints the version.

examples:
  attnlab train --config=experiments/align/grammar_gru.py --workdir=runs/grammar
  attnlab train --config=experiments/align/grammar_gru.py --workdir=runs/big --config.model.hidden=512
  attnlab eval --workdir=runs/grammar --split=test
  attnlab translate --workdir=runs/grammar "The black cat sleeps."
  attnlab train --config=experiments/language/shakespeare_char.py --workdir=runs/shakespeare
  attnlab generate --workdir=runs/shakespeare --prompt="ROMEO:" --temperature=0.8
  attnlab count --config=experiments/language/gpt3_175b.py
  attnlab aer --gold=gold.naacl --links=aligner.pharaoh"""


# The command line


def _parse(name: str, argv: list[str]) -> argparse.Namespace:
    """The flags by name, `words` and `overrides` beside them; whatever else stands there is refused."""
    if '--' in argv:
        raise UserError(f'{name} takes nothing after --, got {" ".join(argv[argv.index("--") :])!r}')
    command = _COMMANDS[name]
    overrides, rest = _split_overrides(argv) if command.overrides else ([], argv)
    given, unknown = _parser(name, command).parse_known_args(rest)
    for token in unknown:
        _check_word(name, command, token)
    values = {flag.name: _one(name, flag, getattr(given, flag.name)) for flag in command.flags}
    return argparse.Namespace(**values, words=unknown, overrides=overrides)


def _check_word(name: str, command: _Command, token: str) -> None:
    if token.startswith('-') and ' ' not in token:
        raise UserError(f'{name} does not understand {token!r}{_nearest_flag(token, command)}')
    if not command.words:
        override = command.overrides and '=' in token
        hint = f'; did you mean --config.{token.removeprefix("config.")}?' if override else ''
        raise UserError(f'{name} takes only flags, got {token!r}{hint}')


def _one(name: str, flag: _Flag, values: list | None) -> Any:
    if not values:
        if flag.needed:
            raise UserError(f'{name} needs --{flag.name}={flag.metavar}')
        return None if flag.metavar else False
    if len(values) > 1:
        raise UserError(f'--{flag.name} is given {len(values)} times; once is expected')
    if values == ['']:
        raise UserError(f'--{flag.name} expects {flag.metavar}, got nothing')
    return values[0]


def _parser(name: str, command: _Command) -> argparse.ArgumentParser:
    words = f' [{command.words} ...]' if command.words else ''
    forms = [f'--{flag.name}={flag.metavar}'.removesuffix('=') for flag in command.flags]
    flags = [form if flag.needed else f'[{form}]' for flag, form in zip(command.flags, forms, strict=True)]
    usage = ' '.join(['attnlab', name, *flags]) + ' [--config.KEY=VALUE ...]' * command.overrides + words
    parser = argparse.ArgumentParser(usage=usage, description=command.summary, allow_abbrev=False)
    parser.error = _refuse
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


def _nearest_flag(token: str, command: _Command) -> str:
    name = token.lstrip('-')
    if command.overrides and name.startswith('config.'):
        return f'; did you mean --{name}?'
    return _nearest('--' + name.partition('=')[0], [f'--{flag.name}' for flag in command.flags] + ['--help'])


def _nearest(name: str, names: Sequence[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f'; did you mean {near[0]}?' if near else f'; expected one of {", ".join(names)}'


# Directories and pipes


def _run_directory(name: str) -> Path:
    workdir = Path(name)
    if (workdir / 'config.json').is_file():
        return workdir
    if workdir.is_dir():
        raise UserError(f'--workdir={workdir} holds no run (it has no config.json){_runs_near(workdir)}')
    if workdir.exists():
        raise UserError(f'--workdir={workdir} is a file, expected the directory of a run')
    raise UserError(f'--workdir={workdir} does not exist{_runs_near(workdir)}')


def _runs_near(workdir: Path) -> str:
    """The runs below the nearest folder that exists and holds any, likeliest first."""
    import difflib

    for folder in (workdir, workdir.parent, workdir.parent.parent):
        runs = [str(path.parent) for pattern in ('*/config.json', '*/*/config.json') for path in folder.glob(pattern)]
        if runs := difflib.get_close_matches(str(workdir), runs, n=3, cutoff=0.0):
            return f'; runs nearby: {", ".join(runs)}'
    return ''


def _piped_sentences() -> list[str]:
    """The lines of the standard input: UTF-8 in any locale, ending at LF or CRLF only."""
    if sys.stdin.isatty():
        raise UserError('translate expects a sentence in quotes, or sentences from a pipe, one a line')
    lines = sys.stdin.buffer.read().removeprefix(b'\xef\xbb\xbf').removesuffix(b'\n').split(b'\n')
    if lines == [b'']:
        raise UserError('translate expects sentences, got an empty standard input')
    try:
        return [line.removesuffix(b'\r').decode('utf-8') for line in lines]
    except UnicodeDecodeError:
        number = next(i for i, line in enumerate(lines, 1) if not _is_utf8(line))
        raise UserError(f'the standard input is not UTF-8 at line {number}') from None


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode('utf-8')
    except UnicodeDecodeError:
        return False
    return True
