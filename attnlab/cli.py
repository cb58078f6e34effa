"""The command line: run one command, print an error in one line, return the exit code.

Exit codes: 0 success; 1 the run cannot continue; 2 invalid command line, config or data; 130 SIGINT and 143 SIGTERM,
after which a training has saved its state.

Only light modules are imported here; a command imports what it needs after its command line has been checked.
"""

import sys
from collections.abc import Sequence

from attnlab import environment, files
from attnlab.commands import COMMANDS, COMPUTING_COMMANDS
from attnlab.errors import RunError, Stopped, UserError
from attnlab.flags import nearest, parse


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.  argv: arguments without the program; None: `sys.argv[1:]`."""
    if argv is None:
        environment.exit_on_interrupt()
        environment.open_standard_streams()
        if sys.argv[1:2] and sys.argv[1] in COMPUTING_COMMANDS:
            environment.enable_large_pages()
    code, line = _run(list(sys.argv[1:] if argv is None else argv))
    if environment.is_distributed:
        from attnlab.train import processes

        line = processes.prefix_process_number(line) if line else ''
    if line:
        environment.print_error(_printable(line))
    if code and environment.is_distributed and processes.is_multi_process():
        processes.exit_process(code)
    if code == 1 and argv is None:  # at a usual exit, threads of a failed save would print their tracebacks too
        environment.exit_now(code)
    return code


def _run(argv: list[str]) -> tuple[int, str]:
    """Return the exit code and the error line, '' for none."""
    try:
        code = _dispatch(argv) or 0
        sys.stdout.flush()  # a full disk is reported here, not by a traceback at exit
        return code, ''
    except UserError as error:
        return 2, str(error)
    except RunError as error:
        return 1, str(error)
    except Stopped as stopped:
        return stopped.code, str(stopped)
    except KeyboardInterrupt:
        return 130, 'interrupted'
    except BrokenPipeError:  # the reader of the standard output has closed it
        return 1, ''
    except (MemoryError, RuntimeError, AssertionError) as error:
        if reason := environment.device_error():
            return 2, reason
        if isinstance(error, MemoryError) or str(error).startswith('RESOURCE_EXHAUSTED'):  # NumPy's, or JAX's
            return 1, f'not enough memory: {(str(error) or "Python has none left").splitlines()[0]}'
        raise
    except OSError as error:  # such as a full disk or a missing permission
        reason = error.strerror or str(error)
        return 1, f'{error.filename}: {reason}' if error.filename else reason


def _printable(text: str) -> str:
    """Return text as one line; control characters and bytes that are not UTF-8 become escapes."""
    line = ' '.join(text.splitlines())
    return ''.join(c if c.isprintable() else c.encode('unicode_escape').decode('ascii') for c in line)


def _dispatch(argv: list[str]) -> int | None:
    """Run the command that the arguments name; return its exit code, None for success."""
    for argument in argv:
        if '\0' in argument:  # possible in a call of `main` only; Python 3.13 raises ValueError for such a path
            raise UserError(f'the argument {argument!r} contains a NUL character')
        if not files.is_utf8(argument):
            raise UserError(f'the argument {argument!r} is not UTF-8')
    match argv:
        case ['-h' | '--help' | 'help', *_]:
            print(_help())
        case ['--version', *_]:
            from attnlab import __version__

            print('attnlab', __version__)
        case [name, *rest] if name in COMMANDS:
            return COMMANDS[name].run(parse(name, COMMANDS[name], rest))
        case [name, *_]:
            raise UserError(f'there is no command {name!r}{nearest(name, [*COMMANDS, "--help", "--version"])}')
        case _:
            raise UserError(f'a command is missing: expected one of {", ".join(COMMANDS)}; see attnlab --help')


def _help() -> str:
    commands = '\n'.join(f'  {name:<10} {command.summary}' for name, command in COMMANDS.items())
    return f"""usage: attnlab COMMAND [--flag=value ...]

{commands}

attnlab COMMAND --help lists the flags of a command; attnlab --version prints the version.

examples:
  attnlab train --config=experiments/align/grammar_gru.py --workdir=runs/grammar
  attnlab train --config=experiments/align/grammar_gru.py --workdir=runs/big --config.model.hidden=512
  attnlab eval --workdir=runs/grammar --split=test
  attnlab translate --workdir=runs/grammar "the black cat sleeps."
  attnlab train --config=experiments/language/shakespeare_char.py --workdir=runs/shakespeare
  attnlab generate --workdir=runs/shakespeare --prompt="ROMEO:" --temperature=0.8
  attnlab train --config=experiments/vision/digits.py --workdir=runs/digits
  attnlab attend --workdir=runs/digits 0 1 2
  attnlab sweep --config=experiments/language/shakespeare_char.py --sweep=heads --workdir=sweeps/heads --workers=2
  attnlab count --config=experiments/language/gpt3_175b.py
  attnlab aer --gold=gold.naacl --links=aligner.pharaoh"""
