"""Command lines that make no sense: exit code 1 or 2, one line, no traceback, nothing written, no long wait."""

import io
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnlab import cli, commands, configs
from attnlab.errors import UserError
from attnlab.flags import Command

ROOT = Path(cli.__file__).parents[1]
LIMIT = 20.0
"""Seconds after which a command line that is refused must have been."""

HUGE = '9' * 5000  # more digits than Python turns into an int

EXPERIMENTS = {
    'e.py': 'vision/digits.py',
    'gru.py': 'align/grammar_gru.py',
    'transformer.py': 'align/grammar_transformer.py',
    'language.py': 'language/shakespeare_char.py',
    'imagenet.py': 'vision/imagenet_b16.py',
}
BROKEN = {
    'empty.py': '',
    'syntax.py': 'def get_config(',
    'nul.py': 'x = "\0"',
    'raises.py': 'raise KeyError("x")',
    'exits.py': 'import sys; sys.exit(0)',
    'exits_later.py': 'def get_config(arg=""): raise SystemExit(0)',
    'endless.py': 'def get_config(arg=""): return get_config(arg=arg)',  # without arg Python 3.13.0 counts no depth
    'none.py': 'def get_config(arg=""): pass',
    'list.py': 'def get_config(arg=""): return [1]',
    'dict.py': 'def get_config(arg=""): return {"task": "vision"}',
    'no_fields.py': 'import ml_collections\ndef get_config(arg=""): return ml_collections.ConfigDict()',
    'strange.py': 'import ml_collections\ndef get_config(arg=""): return ml_collections.ConfigDict({"task": b"x"})',
    'imports.py': 'import no_such_module',
    'two.py': 'def get_config(a, b): pass',
}
SWEEPS = '''
def sweep_raises(): raise KeyError('x')
def sweep_none(): pass
def sweep_empty(): return []
def sweep_numbers(): return [1, 2]
def sweep_typo(): return [{'model.laysers': 2}]
def sweep_type(): return [{'model.layers': 'two'}]
def sweep_twice(): return [{'model.layers': 2}, {'model.layers': 2}]
def sweep_bad(): return [{'model.heads': 3}]
def search_x(trial): return {}
'''
RUN = {
    'empty': '', 'object': '{}', 'list': '[]', 'number': '3', 'binary': '\0\x01', 'later': '{"task": "later"}',
    'deep': '[' * 100_000,
}  # fmt: skip


@pytest.fixture(scope='module')
def made(tmp_path_factory) -> Path:
    """A folder with experiments and runs, whole and broken, and files that are neither."""
    folder = tmp_path_factory.mktemp('hostile')
    for name, experiment in EXPERIMENTS.items():
        shutil.copy(ROOT / 'experiments' / experiment, folder / name)
    (folder / 'sweeps.py').write_text((folder / 'e.py').read_text('utf-8') + SWEEPS)
    for name, text in BROKEN.items():
        (folder / name).write_text(text)
    (folder / 'latin.py').write_bytes(b'x = "\xe9"')
    (folder / 'text').write_text('a b c\n')
    (folder / 'binary').write_bytes(bytes(range(256)) * 9)
    (folder / 'folder').mkdir()
    (folder / 'gone').symlink_to('nowhere')
    os.mkfifo(folder / 'pipe.py')
    (folder / 'swept').mkdir()
    (folder / 'swept' / 'sweep.json').write_text('{}')
    for name in ('e', 'gru', 'language'):
        (folder / 'runs' / name).mkdir(parents=True)
        configs.save_config(configs.load_experiment(str(folder / f'{name}.py')), folder / 'runs' / name / 'config.json')
    (folder / 'runs' / 'gru' / 'checkpoints' / '1').mkdir(parents=True)  # without one, another config may start there
    for name, text in RUN.items():
        (folder / 'broken' / name).mkdir(parents=True)
        (folder / 'broken' / name / 'config.json').write_text(text)
    (folder / 'broken' / 'folder' / 'config.json').mkdir(parents=True)
    return folder


def no_download(*args, **kwargs):
    raise UserError('no network')


@pytest.fixture
def folder(made, monkeypatch, as_used):
    """The folder as the current one; what would be set for the whole process is not."""
    monkeypatch.chdir(made)
    monkeypatch.setattr('attnlab.environment.configure_process', lambda *args, **kw: None)
    monkeypatch.setattr('attnlab.environment.simulate_cpu_devices', lambda devices: None)
    monkeypatch.setattr('attnlab.train.loop.run_training_loop', None)  # nothing is trained
    monkeypatch.setattr('attnlab.launch.launch_processes', None)
    monkeypatch.delenv('ATTNLAB_DATA', raising=False)  # where a data set would be found
    monkeypatch.setattr('attnlab.data.download.download_file', no_download)
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(b'')))
    monkeypatch.setattr(sys, 'path', [*sys.path])
    return made


# Each flag of each command

VALUES = {  # of the flags that a command needs
    'config': 'e.py', 'workdir': 'runs/e', 'sweep': 'x', 'gold': 'text', 'links': 'text',
}  # fmt: skip


def of_flags(name: str, command: Command) -> Iterator[list[str]]:
    """Command lines that differ from a right one in one flag."""
    base = {flag.name: f'--{flag.name}={VALUES[flag.name]}' for flag in command.flags if flag.required}
    for left_out in base:
        yield [name, *(text for flag, text in base.items() if flag != left_out)]
    for flag in command.flags:
        others, text = [other for key, other in base.items() if key != flag.name], f'--{flag.name}'
        if flag.metavar:
            yield [name, *others, f'{text}=']
            yield [name, *others, text]
            yield [name, *others, f'{text}=1', f'{text}=1']
            yield [name, *others, text, '--', '1']
        else:
            yield [name, *others, f'{text}=yes']
            yield [name, *others, text, text]
        yield [name, *others, f'{text}=\udcff']
    whole = [name, *base.values()]
    strange = ('--nonsense', '--nonsense=1', '-x', '--', '--=', '---', '--é=1', '--config.\x1b[2J', '-h5')
    yield from ([*whole, word] for word in strange)
    if not command.words:
        yield from ([*whole, word] for word in ('stray', '', ' ', '日本', '\x1b[2J', 'a=b', '\0', '@' * 5000))
    if command.overrides:
        whole += ['--list'] * (name == 'sweep')  # else its workers refuse it, processes of their own
        override = ('--config.', '--config.=', '--config.=1', '--config..=1', '--config.x', '--config.model=1',
                    '--config.model.=1', '--config.é=1', '--config.model.layers', '--config.a.b.c.d=1')  # fmt: skip
        yield from ([*whole, word] for word in override)
        yield [*whole, '--config.seed=1', '--config.seed=1']


# Values

NUMBERS = {
    'sweep --config=e.py --workdir=new --sweep=x': ('workers', 'index', 'trials', 'worker'),
    'translate --workdir=runs/gru word': ('layer',),
    'generate --workdir=runs/language': ('tokens', 'samples', 'seed', 'temperature', 'top_k', 'top_p'),
    'attend --workdir=runs/e 0': ('layer', 'head'),
    'train --config=e.py --workdir=new': ('processes', 'process'),
}
NO_NUMBERS = ('x', 'one', '0x10', '1,5', '--1', HUGE, '1 2', 'nan', '-inf', '1e400')

MESHES = (
    'x', 'data', 'data=', '=2', 'data=x', 'data=-1', 'data=1.5', 'data=1e3', 'data=nan', 'fsdp=0', 'tensor=0', 'data=0',
    'rows=2', 'data=2,', ',', 'data=2;fsdp=2', 'data=2,data=2', 'data=2 fsdp=2', 'fsdp=1000000', 'fsdp=2049',
    'data=2048,tensor=2', 'data=٣', f'data={HUGE}', 'data=99999999999999999999', 'data=3', 'data=128', 'sequence=7',
)  # fmt: skip

SPECS = (
    *BROKEN, 'latin.py', 'pipe.py', 'text', 'binary', 'folder', '.', '/', '..', '/dev/null', 'gone', 'none_such.py',
    'e', 'e.json', 'e.py:arg', 'gru.py:x', 'folder/', 'folder.py', 'e.py/', 'e.py.py', '.py', ':', '.py:', 'e.pyc',
    'é.py', f'{"a" * 300}.py', '~no-such-user/e.py', '~/no_such.py', 'a\nb.py', 'e.py\0', 'imagenet.py:Q/16',
)  # fmt: skip

OVERRIDES = {  # of a training
    'e.py': (
        'seed=-1', 'seed=4294967296', 'seed=1.0', 'seed=nan', 'seed=', f'seed={HUGE}', 'task=x', 'task=', 'task=align',
        'start=nowhere', 'start=runs/e', 'start=text', 'start=~no-such-user/x', 'data.name=mnist', 'data.name=cifar10',
        'data.train_examples=0', 'data.crop=-1', 'data.flip=1', 'data.erase=2', 'data.erase=nan', 'data.policy=x',
        'data.operations=0', 'data.strength=inf', 'data.mixup=-1', 'model.name=resnet model.blocks=0', 'model.name=x',
        'model.layers=0', 'model.layers=-1', 'model.layers=1000000000', 'model.heads=0', 'model.heads=5',
        'model.width=-1', 'model.width=7', 'model.image=16', 'model.image=0,0', 'model.image=16,16,16',
        'model.image=x,y', 'model.image=()', 'model.patch=3,3', 'model.patch=32,32', 'model.pool=x',
        'model.registers=-1', 'model.mlp=x', 'model.mlp_width=-4', 'model.dropout=1', 'model.dropout=-0.1',
        'model.dtype=float64', 'model.norm=x', 'model.order=x', 'model.remat=x', 'model.implementation=x',
        'model.experts=-1', 'model.experts_per_token=0', 'model.embedding=x', 'model.convolutions=0',
        'model.channels=0', 'model.init=-1', 'model.qk_norm=x', 'model.kv_heads=3', 'model.head_width=-1',
        'model.positions=x',
        'model.positions=rotary model.head_width=5', 'model.rotary_base=1', 'model.scan=yes',
        'optimizer.name=x', 'optimizer.schedule=x', 'optimizer.learning_rate=-1', 'optimizer.learning_rate=nan',
        'optimizer.learning_rate=1e999', 'optimizer.b2=1', 'optimizer.b2=-1', 'optimizer.clip=-1',
        'optimizer.weight_decay=-1', 'optimizer.layer_decay=0', 'optimizer.layer_decay=2', 'optimizer.warmup=x',
        'optimizer.warmup=', 'optimizer.warmup=-1_steps', 'train.batch_size=0', 'train.batch_size=-8',
        'train.batch_size=x', 'train.accumulate=0', 'train.accumulate=7', 'train.duration=', 'train.duration=10',
        'train.duration=nan', 'train.duration=inf', 'train.duration=-1', 'train.log_every=0', 'train.eval_every=x',
        'train.save_every=', 'train.patience=-1', 'train.label_smoothing=1', 'train.label_smoothing=-1', 'train.ema=1',
        'train.ema=-1', 'train.mesh=', 'train.mesh=x', 'train.mesh=data=1000000', 'train.mesh=data=3',
        'train.mesh=data=2,data=2', 'train.mesh=tensor=0', 'train.parallel=x', 'train.parallel=pmap train.mesh=fsdp=2',
        'model.dropuot=0.1', 'optimizer.grad_clip=1', 'trian.duration=1', 'Seed=1',
    ),
    'gru.py': (
        'data.widths=', 'data.widths=()', 'data.widths=0', 'data.widths=20,10', 'data.widths=5,5', 'data.widths=x',
        'data.vocabulary=x', 'data.vocabulary_size=0', 'data.vocabulary_size=-5', 'data.name=files', 'model.cell=x',
        'model.attention=x', 'model.hidden=0', 'model.hidden=-1', 'model.embedding=0', 'model.encoder_layers=0',
        'model.encoder_layers=1000000000', 'model.original=true model.cell=lstm', 'decode.beams=0', 'decode.beams=-1',
        'decode.length_penalty=-1', 'decode.length_penalty=nan', 'start=runs/e',
    ),
    'transformer.py': (
        'model.alignment_layer=0', 'model.alignment_layer=9', 'model.alignment_shift=2', 'model.mixer=gru',
        'model.context=0', 'model.positions=learned model.context=4', 'model.name=recurrent model.hidden=0',
        'model.window=-1',
    ),
    'language.py': (
        'data.vocabulary=words', 'data.vocabulary=subwords', 'data.vocabulary_size=9', 'data.share=0', 'data.share=1',
        'data.share=nan', 'data.name=file', 'data.folder=nowhere', 'data.folder=text', 'data.folder=~no-such-user',
        'data.folder=/nope', 'model.kernel_size=0', 'model.context=-1', 'model.name=vit', 'model.mixer=x',
        'model.mixer=gru model.positions=rotary',
    ),
    'imagenet.py': (
        'data.train=', 'data.train=nowhere data.test=nowhere', 'data.train=text data.test=text', 'data.classes=1',
        'data.shape=1', 'data.shape=0,0,0', 'data.held_out=0', 'data.train=folder data.test=folder',
    ),
}  # fmt: skip

COUNTED = ('model.', 'data.widths', 'data.vocabulary', 'data.shape', 'data.classes', 'task')
"""Fields that `count` needs as well."""

DIRECTORIES = (  # of no run
    'nowhere', 'text', 'text/x', 'folder', 'gone', 'gone/x', '.', '/', '/dev/null', 'swept', 'é', 'a' * 300,
    '~no-such-user/x', '~/no-such-run', 'a\x1b[31mb', *(f'broken/{name}' for name in (*RUN, 'folder')),
)  # fmt: skip

NEW_DIRECTORIES = ('text', 'text/x', 'gone', 'gone/x', 'swept', '/dev/null', 'a' * 300, '~no-such-user/x')

REST = """
@
-
--
-x
--versoin
TRAIN
trian
train eval
tr\u00e1in
\u65e5\u672c
train --config=e.py --workdir=runs/gru
train --config=e.py --workdir=new --profile=x
train --config=e.py --workdir=new --profile=0..3
train --config=e.py --workdir=new --profile=5..3
train --config=e.py --workdir=new --profile=1..99999999
train --config=e.py --workdir=new --profile=\u0663..\u0665
train --config=e.py --workdir=new --processes=0
train --config=e.py --workdir=new --processes=-2
train --config=e.py --workdir=new --processes=1
train --config=e.py --workdir=new --processes=1000000
train --config=e.py --workdir=new --process=0
train --config=e.py --workdir=new --process=0 --coordinator=x
train --config=e.py --workdir=new --process=5 --processes=2 --coordinator=x
train --config=e.py --workdir=new --coordinator=x
eval --workdir=runs/e
eval --workdir=runs/e --split=x
eval --workdir=runs/gru --split=
translate --workdir=runs/gru
translate --workdir=runs/gru ''
translate --workdir=runs/gru ' '
translate --workdir=runs/gru x --layer=0
translate --workdir=runs/e x
translate --workdir=runs/language x
generate --workdir=runs/e
generate --workdir=runs/gru
generate --workdir=runs/language
generate --workdir=runs/language --temperature=-1
attend --workdir=runs/e
attend --workdir=runs/e ''
attend --workdir=runs/e nowhere.png
attend --workdir=runs/gru x
attend --workdir=runs/language ' '
aer --gold=nowhere --links=text
aer --gold=text --links=text
aer --gold=folder --links=folder
aer --gold=binary --links=binary
aer --gold=gone --links=gone
bench x
bench seq2sec
bench lm lm
bench lm x
bench ''
sweep --config=sweeps.py --workdir=new --list --sweep=nothing
sweep --config=sweeps.py --workdir=new --list --sweep=raises
sweep --config=sweeps.py --workdir=new --list --sweep=none
sweep --config=sweeps.py --workdir=new --list --sweep=empty
sweep --config=sweeps.py --workdir=new --list --sweep=numbers
sweep --config=sweeps.py --workdir=new --list --sweep=typo
sweep --config=sweeps.py --workdir=new --list --sweep=type
sweep --config=sweeps.py --workdir=new --list --sweep=twice
sweep --config=sweeps.py --workdir=new --list --sweep=bad
sweep --config=sweeps.py --workdir=new --list --sweep=bad,bad
sweep --config=sweeps.py --workdir=new --list --sweep=x
sweep --config=sweeps.py --workdir=new --list --sweep=x,bad
sweep --config=sweeps.py --workdir=new --list --sweep=,
sweep --config=e.py --workdir=new --list --sweep=x
sweep --config=raises.py --workdir=new --list --sweep=x
sweep --config=sweeps.py --workdir=new --sweep=x --workers=0
sweep --config=sweeps.py --workdir=new --sweep=x --index=-1
sweep --config=sweeps.py --workdir=new --sweep=x --index=0
sweep --config=sweeps.py --workdir=new --sweep=x --trials=0
sweep --config=sweeps.py --workdir=new --sweep=x --sampler=x
sweep --config=sweeps.py --workdir=new --sweep=x --pruner=x
sweep --config=sweeps.py --workdir=new --sweep=x --launcher=x
sweep --config=sweeps.py --workdir=new --sweep=x --launcher=slurm
sweep --config=sweeps.py --workdir=new --sweep=x --launcher_options=x
sweep --config=sweeps.py --workdir=new --sweep=x --best=new.py
sweep --config=sweeps.py --workdir=runs/e --sweep=x --best=new.py
"""


def groups() -> dict[str, list[list[str]]]:
    """Command lines by what is wrong with them."""
    found = {f'flags of {name}': list(of_flags(name, command)) for name, command in commands.COMMANDS.items()}
    found['numbers'] = [
        [*start.split(), f'--{flag}={value}'] for start, flags in NUMBERS.items() for flag in flags
        for value in NO_NUMBERS
    ]  # fmt: skip
    found['meshes'] = [['count', '--config=e.py', f'--mesh={mesh}'] for mesh in MESHES]
    found['experiments'] = [['train', f'--config={spec}', '--workdir=new'] for spec in SPECS]
    found['experiments'] += [['count', f'--config={spec}'] for spec in SPECS]
    for experiment, overrides in OVERRIDES.items():
        every = [[f'--config={experiment}', *(f'--config.{each}' for each in one.split())] for one in overrides]
        found[f'fields of {experiment}'] = [['train', '--workdir=new', *flags] for flags in every]
        counted = [['count', *flags] for flags in every if flags[1].removeprefix('--config.').startswith(COUNTED)]
        found[f'fields of {experiment}, counted'] = counted
    readers = (['eval'], ['translate', 'A cat.'], ['generate'], ['attend', 'A cat.'])
    found['runs'] = [[first, f'--workdir={name}', *rest] for first, *rest in readers for name in DIRECTORIES]
    found['new directories'] = [['train', '--config=e.py', f'--workdir={name}'] for name in NEW_DIRECTORIES]
    found['others'] = [[], [''], ['\udcff'], ['\x1b[2J'], *map(shlex.split, REST.strip().splitlines())]
    return found


GROUPS = groups()


def tree(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob('*') if '__pycache__' not in path.parts)


@pytest.mark.parametrize('group', GROUPS)
def test_it_is_refused_in_one_line(folder, capfd, group):
    before = tree(folder)
    for argv in GROUPS[group]:
        start = time.process_time()  # not of the clock: other tests run beside it
        code = cli.main(argv)
        seconds = time.process_time() - start
        out, error = capfd.readouterr()
        assert code in (1, 2) and out == '', (argv, out, error)
        assert error.startswith('attnlab: ') and error.endswith('\n') and error[:-1].isprintable(), (argv, error)
        assert tree(folder) == before, argv
        assert seconds < LIMIT, argv


def test_they_are_many():
    assert sum(map(len, GROUPS.values())) > 900


PROCESSES = [
    (b'attnlab \xff', b'is not UTF-8'),
    (b'attnlab aer --gold=\xff --links=x', b'is not UTF-8'),
    (b'attnlab \x1b[2J', rb'there is no command'),
    (b'attnlab train --config=e.py --workdir=new --config.train.mesh=data=1000000', b'train.mesh'),
    (b'attnlab count --config=e.py --mesh=fsdp=1000000', b'expected at most 2048'),
    (b'attnlab eval --workdir=runs/e', b'has no checkpoint yet'),
    (b'attnlab translate --workdir=runs/gru', b'empty standard input'),
    (b'attnlab sweep --config=sweeps.py --workdir=new --sweep=typo', b'did you mean config.model.layers?'),
    (b'attnlab train --config=exits.py --workdir=new', b'SystemExit'),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(('line', 'message'), PROCESSES, ids=[message.decode() for _, message in PROCESSES])
@pytest.mark.parametrize('encoding', ['utf-8', 'ascii'])
def test_a_process_is_refused_in_one_line(made, monkeypatch, line, message, encoding):
    monkeypatch.setenv('PYTHONPATH', str(ROOT))
    monkeypatch.setenv('PYTHONIOENCODING', encoding)
    before = tree(made)
    argv = [os.fsencode(sys.executable), b'-m', *line.split()]
    done = subprocess.run(argv, cwd=made, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
    assert done.returncode in (1, 2) and done.stdout == b''
    assert done.stderr.startswith(b'attnlab: ') and done.stderr.count(b'\n') == 1 and message in done.stderr
    assert tree(made) == before
