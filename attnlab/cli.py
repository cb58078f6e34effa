"""The commands: flags in, exit code out.  0 is success, 1 a run that cannot go on and 2 a
user's mistake, each told in one line; 130 and 143 an interrupt (SIGINT) and SIGTERM, after which a training has saved.

Nothing heavy is imported here: a command imports what it runs once its command line is understood.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from attnlab import environment, files
from attnlab.errors import RunError, Stopped, UserError
from attnlab.flags import Command, Flag, nearest, number, parse, span


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns the exit code; None for that of the process."""
    if argv is None:
        environment.exit_on_interrupt()
        environment.open_standard_streams()
        if sys.argv[1:2] and sys.argv[1] in _COMPUTING:
            environment.enable_large_pages()
    code, line = _run(list(sys.argv[1:] if argv is None else argv))
    if environment.is_distributed:
        from attnlab.train import processes

        line = processes.prefix_process_number(line) if line else ''
    if line:
        environment.print_error(_printable(line))
    if code and environment.is_distributed and processes.is_multi_process():
        processes.exit_process(code)
    if code == 1 and argv is None:  # threads of a save that failed would tell of it once more, in tracebacks
        environment.exit_now(code)
    return code


def _run(argv: list[str]) -> tuple[int, str]:
    """The exit code, and what is to be said of it."""
    try:
        code = _dispatch(argv) or 0
        sys.stdout.flush()  # while a full disk can still be reported in one line
        return code, ''
    except UserError as error:
        return 2, str(error)
    except RunError as error:
        return 1, str(error)
    except Stopped as wish:
        return wish.code, str(wish)
    except KeyboardInterrupt:
        return 130, 'interrupted'
    except BrokenPipeError:  # whoever read what is printed has gone
        return 1, ''
    except (MemoryError, RuntimeError, AssertionError) as error:
        if reason := environment.device_error():
            return 2, reason
        if isinstance(error, MemoryError) or str(error).startswith('RESOURCE_EXHAUSTED'):  # NumPy's, or a device's
            return 1, f'not enough memory: {(str(error) or "Python has none left").splitlines()[0]}'
        raise
    except OSError as error:  # a full disk, a folder that nobody may write to
        said = error.strerror or str(error)
        return 1, f'{error.filename}: {said}' if error.filename else said


def _printable(text: str) -> str:
    """The text as one line, with escapes for what a terminal would obey and for bytes that are not UTF-8."""
    line = ' '.join(text.splitlines())
    return ''.join(c if c.isprintable() else c.encode('unicode_escape').decode('ascii') for c in line)


def _dispatch(argv: list[str]) -> int | None:
    """Runs a command; the exit code, None for success."""
    for argument in argv:
        if '\0' in argument:  # only a call of `main` can have it, and Python 3.13 raises for it in a path
            raise UserError(f'the argument {argument!r} holds the character NUL')
        if not files.is_utf8(argument):
            raise UserError(f'the argument {argument!r} is not UTF-8')
    match argv:
        case ['-h' | '--help' | 'help', *_]:
            print(_help())
        case ['--version', *_]:
            from attnlab import __version__

            print('attnlab', __version__)
        case [name, *rest] if name in _COMMANDS:
            return _COMMANDS[name].run(parse(name, _COMMANDS[name], rest))
        case [name, *_]:
            raise UserError(f'there is no command {name!r}{nearest(name, [*_COMMANDS, "--help", "--version"])}')
        case _:
            raise UserError(f'a command is missing: one of {", ".join(_COMMANDS)}; attnlab --help tells more')


# The commands


def _train(given: argparse.Namespace) -> int | None:
    from attnlab import configs

    config = configs.load_experiment(given.config, given.overrides)
    workdir = Path(given.workdir)
    files.check_folder(workdir, 'workdir')
    if (workdir / 'sweep.json').exists():
        raise UserError(f'--workdir={workdir} holds a sweep; expected a new directory, or that of a run')
    count, number = _processes(given)
    profile = span('profile', given.profile)

    if count and number is None:
        from attnlab.launch import MAX_PROCESSES, launch_processes

        if count > MAX_PROCESSES:
            raise UserError(f'--processes is {count}; expected at most {MAX_PROCESSES} on one machine')
        environment.configure_process(count)
        return launch_processes(sys.argv[1:], count)
    environment.stop_with_launcher()
    environment.configure_process(number=number or 0)
    from attnlab.train import processes, run

    if given.processes:
        processes.join_processes(count, number, given.coordinator)
    done = run.train_run(config, workdir, debug_nans=given.debug_nans, profile=profile)
    if processes.is_first_process():
        print('trained,', ', '.join(f'{name} {value:.6g}' for name, value in done.items()))
    return None


def _processes(given: argparse.Namespace) -> tuple[int | None, int | None]:
    """How many processes the run has, and which this is; None and None for one alone, and where others tell."""
    which = number('process', given.process, int)
    count = None if given.processes == 'auto' else number('processes', given.processes, int)
    if given.processes is not None and count is not None and count < 2:
        raise UserError(f'--processes is {count}; expected 2 or more, or auto')
    if (given.process is None) != (given.coordinator is None):
        raise UserError('--process and --coordinator go together; got only one of them')
    if which is not None and (count is None or not 0 <= which < count):
        raise UserError(f'--process is {which}, --processes {given.processes}; expected 0 <= process < processes')
    return count, which


def _sweep(given: argparse.Namespace) -> int | None:
    from attnlab.sweeps import command

    return command.run_sweep_command(given)


def _eval(given: argparse.Namespace) -> None:
    workdir = _run_directory(given.workdir)

    environment.configure_process()
    from attnlab.report import page, terminal
    from attnlab.train import run

    split, scores = run.evaluate_run(workdir, given.split)
    print(terminal.format_scores(scores))
    with files.log_write_errors(workdir):
        print(f'page: {page.write_run_page(workdir, split, scores)}')


def _translate(given: argparse.Namespace) -> None:
    from attnlab.data.text import is_blank

    workdir = _run_directory(given.workdir)
    layer = number('layer', given.layer, int)
    sentences = given.words or _piped_sentences()
    for at, sentence in enumerate(sentences, 1):
        if is_blank(sentence):
            raise UserError(f'sentence {at} is empty')

    environment.configure_process()
    from attnlab.tasks.align import pictures
    from attnlab.train import run

    for translated in run.load_run(workdir).translate(sentences, given.joined, layer, given.shifted):
        print(translated.text)
        if translated.weights.size:
            pictures.show_alignment(workdir, translated)


def _generate(given: argparse.Namespace) -> None:
    workdir = _run_directory(given.workdir)
    numbers = {name: number(name, getattr(given, name), kind) for name, kind in _GENERATED.items()}

    environment.configure_process()
    from attnlab.train import run

    options = {name: number for name, number in numbers.items() if number is not None}
    for text in run.load_run(workdir).generate(given.prompt or '', **options):
        print(text)


_GENERATED = {'tokens': int, 'samples': int, 'seed': int, 'temperature': float, 'top_k': int, 'top_p': float}


def _attend(given: argparse.Namespace) -> None:
    from attnlab.data.text import is_blank

    workdir = _run_directory(given.workdir)
    layer, head = (number(name, getattr(given, name), int) for name in ('layer', 'head'))
    texts = given.words
    if not texts or any(map(is_blank, texts)):
        raise UserError('attend expects a text in quotes, an image, or several')
    files.check_writable(workdir)  # files are all that it makes

    environment.configure_process()
    from attnlab.tasks.task import SupportsAttend, require_support
    from attnlab.train import run

    trained = run.load_run(workdir)
    require_support(trained.task, SupportsAttend, 'attend').attend(trained.params, texts, layer, head)


def _count(given: argparse.Namespace) -> None:
    from attnlab import configs

    config = configs.load_experiment(given.config, given.overrides)

    environment.configure_process()
    if given.mesh is None:
        from attnlab.train import count

        print(count.format_costs(*count.count_costs(config)))
    else:
        from attnlab.train import communication, devices

        environment.simulate_cpu_devices(devices.count_mesh_devices(given.mesh))
        print(communication.format_communication(*communication.count_communication(config, given.mesh)))


def _config(given: argparse.Namespace) -> None:
    from attnlab import configs
    from attnlab.configs import describe, fields
    from attnlab.configs.tasks import config_class

    config = configs.load_experiment(given.config, given.overrides)
    environment.configure_process()
    cls = config_class(config.task)
    fields.to_dataclass(cls, config)
    print(describe.config_table(cls, config))


def _aer(given: argparse.Namespace) -> None:
    from attnlab.data import alignments

    scores = alignments.score_alignment_files(given.gold, given.links, given.swap)
    print(f'AER {scores.aer:.4f}  precision {scores.precision:.4f}  recall {scores.recall:.4f}')


def _bench(given: argparse.Namespace) -> None:
    import importlib

    if len(given.words) > 1:
        raise UserError(f'bench takes one of {", ".join(_BENCHES)}, got {" ".join(given.words)!r}')
    for name in given.words:
        if name not in _BENCHES:
            raise UserError(f'there is no bench {name!r}{nearest(name, _BENCHES)}')
    for name in given.words or _BENCHES:
        importlib.import_module(f'attnlab.bench.{name}').main()


_BENCHES = ('seq2seq', 'attention', 'lm', 'vit')


_COMPUTING = ('train', 'sweep', 'eval', 'translate', 'generate', 'attend', 'bench')

_A_RUN = Flag('workdir', 'DIR', 'the directory of a trained run', needed=True)

_COMMANDS = {
    'train': Command(
        _train,
        'trains an experiment; run again, it goes on where it stopped',
        (
            Flag('config', 'FILE[:ARG]', 'experiment file with get_config(arg), and its argument', needed=True),
            Flag('workdir', 'DIR', 'where everything about the run is written', needed=True),
            Flag('processes', 'N|auto', 'starts so many on this machine; auto: as SLURM or a cloud has started them'),
            Flag('process', 'I', 'is number I of the processes, started by hand'),
            Flag('coordinator', 'HOST:PORT', 'where number 0 of them listens'),
            Flag('debug_nans', '', 'where a step is not finite, say which module or gradient was so first; slower'),
            Flag('profile', 'A..B', "trace steps A to B into the directory's profile/"),
        ),
        overrides=True,
    ),
    'sweep': Command(
        _sweep,
        'trains the points of a sweep or a search; run again, it goes on where it stopped',
        (
            Flag('config', 'FILE[:ARG]', 'experiment file with sweep_NAME() or search_NAME(trial)', needed=True),
            Flag('sweep', 'NAME[,NAME]', 'which of its sweeps, the product of several; or a search', needed=True),
            Flag('workdir', 'DIR', 'where everything about the sweep is written', needed=True),
            Flag('workers', 'N', 'processes or jobs that share the points, the cores and the GPUs (default: 1)'),
            Flag('list', '', 'shows the points, checked, and runs none'),
            Flag('index', 'I', 'runs this point alone, with no database, as a job of an array'),
            Flag('retry', '', 'runs the points again that failed'),
            Flag('best', 'FILE.py', 'writes the best config as an experiment file, and runs nothing'),
            Flag('storage', 'URL', 'a database that several machines share (default: a file in DIR, for one machine)'),
            Flag('launcher', 'slurm|local', 'submits the workers as jobs, through submitit'),
            Flag('launcher_options', 'KEY=VALUE,...', 'of a job, as in partition=gpu,timeout_min=60'),
            Flag('trials', 'N', 'points of a search (default: 20)'),
            Flag('sampler', 'random|tpe|cmaes', 'how a search draws its points (default: tpe)'),
            Flag('pruner', 'none|median|asha|hyperband', 'which runs of a search end early (default: none)'),
            Flag('worker', 'I', 'is number I of the workers, as the command starts them'),
        ),
        overrides=True,
    ),
    'eval': Command(
        _eval,
        'scores a run, every example once',
        (
            _A_RUN,
            Flag('split', 'NAME', 'which split of its data (default: test, or valid where there is none)'),
        ),
    ),
    'translate': Command(
        _translate,
        'prints the French and draws its alignment; sentences also come from a pipe, one a line',
        (
            _A_RUN,
            Flag('joined', '', 'draw words, not sub-words'),
            Flag('layer', 'N', "a Transformer's alignment is that of this layer, from 1 (default: its config's)"),
            Flag('shifted', '', 'read it one step later, where a word is fed'),
        ),
        words='SENTENCE',
    ),
    'generate': Command(
        _generate,
        'lets a language model go on from a prompt',
        (
            _A_RUN,
            Flag('prompt', 'TEXT', 'what it goes on from'),
            Flag('tokens', 'N', 'how many to add at most (default: 200)'),
            Flag('samples', 'N', 'how many texts (default: 1)'),
            Flag('seed', 'N', 'of the draws (default: 0)'),
            Flag('temperature', 'X', '0 takes the likeliest token (default: 1)'),
            Flag('top_k', 'K', 'draws from the K likeliest tokens only'),
            Flag('top_p', 'P', 'draws from the likeliest tokens that have probability P together'),
        ),
    ),
    'attend': Command(
        _attend,
        'draws the attention of every layer and head over texts, or images: files, or numbers of the test split',
        (
            _A_RUN,
            Flag('layer', 'N', 'draw this layer alone, from 1'),
            Flag('head', 'N', 'draw this head alone, from 1'),
        ),
        words='TEXT|IMAGE',
    ),
    'count': Command(
        _count,
        'parameters, FLOP and memory of a config, layer by layer, with nothing allocated',
        (
            Flag('config', 'FILE[:ARG]', 'experiment file with get_config(arg), and its argument', needed=True),
            Flag('mesh', 'SIZES', 'bytes of a device and what a step sends instead, on a mesh as in data=8,tensor=8'),
        ),
        overrides=True,
    ),
    'config': Command(
        _config,
        'every field of a config: value, description, allowed values',
        (Flag('config', 'FILE[:ARG]', 'experiment file with get_config(arg), and its argument', needed=True),),
        overrides=True,
    ),
    'aer': Command(
        _aer,
        "alignment error rate, precision and recall of any aligner's links",
        (
            Flag('gold', 'FILE', 'gold alignments, NAACL 2003 or Pharaoh format', needed=True),
            Flag('links', 'FILE', "an aligner's output, either format", needed=True),
            Flag('swap', '', 'the links name the target first'),
        ),
    ),
    'bench': Command(
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
  attnlab train --config=experiments/vision/digits.py --workdir=runs/digits
  attnlab attend --workdir=runs/digits 0 1 2
  attnlab sweep --config=experiments/language/shakespeare_char.py --sweep=heads --workdir=sweeps/heads --workers=2
  attnlab count --config=experiments/language/gpt3_175b.py
  attnlab aer --gold=gold.naacl --links=aligner.pharaoh"""


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
        at = next(i for i, line in enumerate(lines, 1) if not _is_utf8(line))
        raise UserError(f'the standard input is not UTF-8 at line {at}') from None


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode('utf-8')
    except UnicodeDecodeError:
        return False
    return True
