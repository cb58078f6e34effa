"""The commands: a function for each, and the table of their flags.

A command first checks its command line, and only then imports JAX and other slow libraries.
"""

import argparse
import sys
from pathlib import Path

from attnlab import environment, files
from attnlab.errors import UserError
from attnlab.flags import Command, Flag, nearest, number, span


def _train(args: argparse.Namespace) -> int | None:
    from attnlab import configs

    config = configs.load_experiment(args.config, args.overrides)
    workdir = Path(args.workdir)
    files.check_folder(workdir, 'workdir')
    if (workdir / 'sweep.json').exists():
        raise UserError(f'--workdir={workdir} holds a sweep; expected a new directory, or that of a run')
    count, process = _process_numbers(args)
    profile = span('profile', args.profile)

    if count and process is None:
        from attnlab.launch import MAX_PROCESSES, launch_processes

        if count > MAX_PROCESSES:
            raise UserError(f'--processes is {count}; expected at most {MAX_PROCESSES} on one machine')
        environment.configure_process(count)
        return launch_processes(sys.argv[1:], count)
    environment.stop_with_launcher()
    environment.configure_process(number=process or 0)
    from attnlab.train import processes, run

    if args.processes:
        processes.join_processes(count, process, args.coordinator)
    scores = run.train_run(config, workdir, debug_nans=args.debug_nans, profile=profile)
    if processes.is_first_process():
        print('trained,', ', '.join(f'{name} {value:.6g}' for name, value in scores.items()))
    return None


def _process_numbers(args: argparse.Namespace) -> tuple[int | None, int | None]:
    """Return the number of processes and the number of this one; None where a flag is absent or says auto."""
    process = number('process', args.process, int)
    count = None if args.processes == 'auto' else number('processes', args.processes, int)
    if args.processes is not None and count is not None and count < 2:
        raise UserError(f'--processes is {count}; expected 2 or more, or auto')
    if (args.process is None) != (args.coordinator is None):
        raise UserError('--process and --coordinator go together; got only one of them')
    if process is not None and (count is None or not 0 <= process < count):
        raise UserError(f'--process is {process}, --processes {args.processes}; expected 0 <= process < processes')
    return count, process


def _sweep(args: argparse.Namespace) -> int | None:
    from attnlab.sweeps import command

    return command.run_sweep_command(args)


def _eval(args: argparse.Namespace) -> None:
    workdir = _run_directory(args.workdir)

    environment.configure_process()
    from attnlab.report import page, terminal
    from attnlab.train import run

    split, scores = run.evaluate_run(workdir, args.split)
    print(terminal.format_scores(scores))
    with files.log_write_errors(workdir):
        print(f'page: {page.write_run_page(workdir, split, scores)}')


def _translate(args: argparse.Namespace) -> None:
    from attnlab.data.text import is_blank

    workdir = _run_directory(args.workdir)
    layer = number('layer', args.layer, int)
    sentences = args.words or _piped_sentences()
    for position, sentence in enumerate(sentences, 1):
        if is_blank(sentence):
            raise UserError(f'sentence {position} is empty')

    environment.configure_process()
    from attnlab.tasks.align import pictures
    from attnlab.train import run

    for translated in run.load_run(workdir).translate(sentences, args.joined, layer, args.shifted):
        print(translated.text)
        if translated.weights.size:
            pictures.show_alignment(workdir, translated)


def _generate(args: argparse.Namespace) -> None:
    workdir = _run_directory(args.workdir)
    numbers = {name: number(name, getattr(args, name), kind) for name, kind in _GENERATE_NUMBERS.items()}

    environment.configure_process()
    from attnlab.train import run

    options = {name: value for name, value in numbers.items() if value is not None}
    for text in run.load_run(workdir).generate(args.prompt or '', **options):
        print(text)


_GENERATE_NUMBERS = {'tokens': int, 'samples': int, 'seed': int, 'temperature': float, 'top_k': int, 'top_p': float}


def _attend(args: argparse.Namespace) -> None:
    from attnlab.data.text import is_blank

    workdir = _run_directory(args.workdir)
    layer, head = (number(name, getattr(args, name), int) for name in ('layer', 'head'))
    texts = args.words
    if not texts or any(map(is_blank, texts)):
        raise UserError('attend expects a text in quotes, an image, or several')
    files.check_writable(workdir)  # the command only writes files

    environment.configure_process()
    from attnlab.tasks.task import SupportsAttend, require_support
    from attnlab.train import run

    trained = run.load_run(workdir)
    require_support(trained.task, SupportsAttend, 'attend').attend(trained.params, texts, layer, head)


def _count(args: argparse.Namespace) -> None:
    from attnlab import configs

    config = configs.load_experiment(args.config, args.overrides)

    environment.configure_process()
    if args.mesh is None:
        from attnlab.train import count

        print(count.format_costs(*count.count_costs(config)))
    else:
        from attnlab.train import communication, devices

        environment.simulate_cpu_devices(devices.count_mesh_devices(args.mesh))
        print(communication.format_communication(*communication.count_communication(config, args.mesh)))


def _config(args: argparse.Namespace) -> None:
    from attnlab import configs
    from attnlab.configs import describe, fields
    from attnlab.configs.tasks import config_class

    config = configs.load_experiment(args.config, args.overrides)
    environment.configure_process()
    cls = config_class(config.task)
    fields.to_dataclass(cls, config)
    print(describe.config_table(cls, config))


def _aer(args: argparse.Namespace) -> None:
    from attnlab.data import alignments

    scores = alignments.score_alignment_files(args.gold, args.links, args.swap)
    print(f'AER {scores.aer:.4f}  precision {scores.precision:.4f}  recall {scores.recall:.4f}')


def _bench(args: argparse.Namespace) -> None:
    import importlib

    if len(args.words) > 1:
        raise UserError(f'bench takes one of {", ".join(BENCHMARKS)}, got {" ".join(args.words)!r}')
    for name in args.words:
        if name not in BENCHMARKS:
            raise UserError(f'there is no bench {name!r}{nearest(name, BENCHMARKS)}')
    for name in args.words or BENCHMARKS:
        importlib.import_module(f'attnlab.bench.{name}').main()


BENCHMARKS = ('seq2seq', 'attention', 'lm', 'vit')


# Directories and pipes


def _run_directory(name: str) -> Path:
    """Return the directory of a run; UserError, with the runs nearby, if it holds none."""
    workdir = Path(name)
    if (workdir / 'config.json').is_file():
        return workdir
    if workdir.is_dir():
        raise UserError(f'--workdir={workdir} holds no run (it has no config.json){_runs_near(workdir)}')
    if workdir.exists():
        raise UserError(f'--workdir={workdir} is a file, expected the directory of a run')
    raise UserError(f'--workdir={workdir} does not exist{_runs_near(workdir)}')


def _runs_near(workdir: Path) -> str:
    """Return the end of an error: the runs below the nearest folder that holds any, the most similar names first."""
    import difflib

    for folder in (workdir, workdir.parent, workdir.parent.parent):
        runs = [str(path.parent) for pattern in ('*/config.json', '*/*/config.json') for path in folder.glob(pattern)]
        if runs := difflib.get_close_matches(str(workdir), runs, n=3, cutoff=0.0):
            return f'; runs nearby: {", ".join(runs)}'
    return ''


def _piped_sentences() -> list[str]:
    """Return the lines of the standard input, read as UTF-8 in any locale; a line ends at LF or CRLF only."""
    if sys.stdin.isatty():
        raise UserError('translate expects a sentence in quotes, or sentences from a pipe, one a line')
    lines = sys.stdin.buffer.read().removeprefix(b'\xef\xbb\xbf').removesuffix(b'\n').split(b'\n')
    if lines == [b'']:
        raise UserError('translate expects sentences, got an empty standard input')
    sentences = []
    for position, line in enumerate(lines, 1):
        try:
            sentences.append(line.removesuffix(b'\r').decode('utf-8'))
        except UnicodeDecodeError:
            raise UserError(f'the standard input is not UTF-8 at line {position}') from None
    return sentences


# Flags

COMPUTING_COMMANDS = ('train', 'sweep', 'eval', 'translate', 'generate', 'attend', 'bench')
"""Commands for which it pays to restart the process with memory in large pages."""

_CONFIG = Flag('config', 'FILE[:ARG]', 'experiment file with get_config(arg), and its argument', required=True)
_RUN = Flag('workdir', 'DIR', 'directory of a trained run', required=True)

COMMANDS = {
    'train': Command(
        _train,
        'train an experiment; the same command continues an interrupted run',
        (
            _CONFIG,
            Flag('workdir', 'DIR', 'directory of the run: config, metrics, checkpoints, figures', required=True),
            Flag('processes', 'N|auto', 'start N processes on this machine; auto: started by SLURM or a cloud'),
            Flag('process', 'I', 'number of this process, from 0, if you start each of them'),
            Flag('coordinator', 'HOST:PORT', 'address at which process 0 listens'),
            Flag('debug_nans', '', 'if a step is not finite, name the first module or gradient that is not; slower'),
            Flag('profile', 'A..B', 'trace steps A to B into the directory profile/ of the run'),
        ),
        overrides=True,
    ),
    'sweep': Command(
        _sweep,
        'train the points of a sweep or a search; the same command continues an interrupted one',
        (
            Flag('config', 'FILE[:ARG]', 'experiment file with sweep_NAME() or search_NAME(trial)', required=True),
            Flag('sweep', 'NAME[,NAME]', 'name of a sweep or a search; several sweeps: their product', required=True),
            Flag('workdir', 'DIR', 'directory of the sweep and its runs', required=True),
            Flag('workers', 'N', 'processes or jobs that share the points, the cores and the GPUs (default: 1)'),
            Flag('list', '', 'check and print the points, train none'),
            Flag('index', 'I', 'train point I only, without a database, as in a job array'),
            Flag('retry', '', 'train failed points again'),
            Flag('best', 'FILE.py', 'write the best config as an experiment file, train nothing'),
            Flag('storage', 'URL', 'database that several machines share (default: a file in DIR, for one machine)'),
            Flag('launcher', 'slurm|local', 'submit the workers as jobs, with submitit'),
            Flag('launcher_options', 'KEY=VALUE,...', 'options of a job, such as partition=gpu,timeout_min=60'),
            Flag('trials', 'N', 'points of a search (default: 20)'),
            Flag('sampler', 'random|tpe|cmaes', 'how a search samples its points (default: tpe)'),
            Flag('pruner', 'none|median|asha|hyperband', 'which runs of a search stop early (default: none)'),
            Flag('worker', 'I', 'number of this worker; set by the command for the workers it starts'),
        ),
        overrides=True,
    ),
    'eval': Command(
        _eval,
        'score a run on a split, every example once',
        (_RUN, Flag('split', 'NAME', 'split of its data (default: test, or valid if there is no test)')),
    ),
    'translate': Command(
        _translate,
        'translate sentences, given or piped one a line, and draw their alignments',
        (
            _RUN,
            Flag('joined', '', 'draw words instead of sub-words'),
            Flag('layer', 'N', "read a Transformer's alignment off layer N, from 1 (default: the config's)"),
            Flag('shifted', '', 'read the alignment one step later, where a token is the decoder input'),
        ),
        words='SENTENCE',
    ),
    'generate': Command(
        _generate,
        'continue a prompt with a language model',
        (
            _RUN,
            Flag('prompt', 'TEXT', 'text to continue'),
            Flag('tokens', 'N', 'largest number of new tokens (default: 200)'),
            Flag('samples', 'N', 'number of texts (default: 1)'),
            Flag('seed', 'N', 'seed of the sampling (default: 0)'),
            Flag('temperature', 'X', 'softmax temperature; 0: the most probable token (default: 1)'),
            Flag('top_k', 'K', 'sample from the K most probable tokens only'),
            Flag('top_p', 'P', 'sample from the most probable tokens whose probabilities add up to P'),
        ),
    ),
    'attend': Command(
        _attend,
        'draw the attention of every layer and head over texts, or images: files, or numbers of the test split',
        (
            _RUN,
            Flag('layer', 'N', 'draw layer N only, from 1'),
            Flag('head', 'N', 'draw head N only, from 1'),
        ),
        words='TEXT|IMAGE',
    ),
    'count': Command(
        _count,
        'parameters, FLOPs and memory of a config, layer by layer; nothing is allocated',
        (
            _CONFIG,
            Flag('mesh', 'SIZES', 'on a mesh such as data=8,tensor=8: bytes of a device, communication of a step'),
        ),
        overrides=True,
    ),
    'config': Command(
        _config,
        'print every field of a config: value, description, allowed values',
        (_CONFIG,),
        overrides=True,
    ),
    'aer': Command(
        _aer,
        "alignment error rate, precision and recall of any aligner's links",
        (
            Flag('gold', 'FILE', 'gold alignments, NAACL 2003 or Pharaoh format', required=True),
            Flag('links', 'FILE', "an aligner's output, either format", required=True),
            Flag('swap', '', 'the links name the target first'),
        ),
    ),
    'bench': Command(
        _bench,
        f'time our steps beside the usual alternatives: {", ".join(BENCHMARKS)} (default: all)',
        words='NAME',
    ),
}
