"""Each command: its flags, the calls it makes, and the command lines it refuses."""

import io
import shutil
import sys
import types
from pathlib import Path

import pytest

from attnlab import cli, commands
from tests.cli.helpers import SCORES, refused

# train


@pytest.mark.parametrize('argv', [
    ['--config=e.py:x', '--workdir=new', '--config.model.layers=3', '--config.lr=1'],
    ['--config', 'e.py:x', '--workdir', 'new', '--config.model.layers', '3', '--config.lr', '1'],
    ['--config.model.layers=3', '--workdir=new', '--config.lr', '1', '--config=e.py:x'],
])  # fmt: skip
def test_train(calls, argv):
    assert cli.main(['train', *argv]) == 0
    [(name, (config, workdir), kw)] = calls
    assert (name, workdir, kw) == ('train_run', Path('new'), {'debug_nans': False, 'profile': None})
    assert (config.name, config.model.layers, config.lr, config.model.shape) == ('x', 3, 1.0, (8, 8))
    assert type(config.lr) is float
    assert config.is_locked


def test_train_watched(calls):
    assert cli.main(['train', '--config=e.py', '--workdir=new', '--debug_nans', '--profile=3..12']) == 0
    assert calls[0][2] == {'debug_nans': True, 'profile': (3, 12)}


@pytest.mark.parametrize('steps', ['3', '0..2', '4..3', '3..', '..3', '3..x', '3...5', '-1..5', '1.5..3', 'x'])
def test_steps_that_are_none(capsys, steps):
    said = refused(capsys, 'train', '--config=e.py', '--workdir=new', f'--profile={steps}')
    assert said == f'--profile expects its first and last step, from 1, as in 10..15; got {steps!r}'


def test_train_into_a_folder_that_exists(calls):
    assert cli.main(['train', '--config=e.py', '--workdir=runs/one']) == 0
    assert calls


def test_an_override_may_be_negative_empty_or_hold_an_equals_sign(calls):
    assert cli.main(['train', '--config=e.py', '--workdir=new', '--config.lr', '-1', '--config.name=a=b']) == 0
    assert (calls[0][1][0].lr, calls[0][1][0].name) == (-1.0, 'a=b')


CASE_43 = [
    (['--config.model.layers=4.0'], "config.model.layers expects an int, got '4.0'"),
    (['--config.model.layers=1e2'], "config.model.layers expects an int, got '1e2'"),
    (['--config.model.laysers=3'], 'there is no config.model.laysers; did you mean config.model.layers?'),
    (['--config.model.dropout=None'], "config.model.dropout expects a finite float, got 'None'"),
    (['--config.lr=nan'], "config.lr expects a finite float, got 'nan'"),
    (['--config.model.nested.bias=no'], "config.model.nested.bias expects true or false, got 'no'"),
    (['--config.model.shape=1,x'], "config.model.shape expects an int, got 'x'"),
    (['--config.lr=1', '--config.lr=1'], 'config.lr is set 2 times'),
    (['--config.lr=1', '--config.lr', '2'], 'config.lr is set 2 times'),
    (['--config.model=3'], 'config.model is a section'),
    (['--config.lr'], '--config.lr expects a value'),
    (['--config.lr', '--config.name=x'], '--config.lr expects a value'),
    (['config.lr=5'], "train takes only flags, got 'config.lr=5'; did you mean --config.lr=5?"),
    (['lr=3'], "train takes only flags, got 'lr=3'; did you mean --config.lr=3?"),
    (['-config.lr=5'], "train does not understand '-config.lr=5'; did you mean --config.lr=5?"),
    (['stray'], "train takes only flags, got 'stray'"),
    (['--', '--config.lr=5'], "train takes nothing after --, got '-- --config.lr=5'"),
    (['--'], 'train takes nothing after --'),
    (['--work=x'], "train does not understand '--work=x'; did you mean --workdir?"),
    (['--confg.lr=3'], "train does not understand '--confg.lr=3'"),
    (['--workdir=other'], '--workdir is given 2 times'),
    (['--config=e.py'], '--config is given 2 times'),
    (['-h5'], "train does not understand '-h5'"),
    (['--processes=1'], '--processes is 1; expected 2 or more, or auto'),
    (['--processes=two'], "--processes expects a whole number, got 'two'"),
    (['--process=0'], '--process and --coordinator go together; got only one of them'),
    (['--processes=2', '--coordinator=here:1'], '--process and --coordinator go together'),
    (['--process=0', '--coordinator=here:1'], '--process is 0, --processes None; expected 0 <= process < processes'),
    (['--processes=2', '--process=2', '--coordinator=here:1'], '--process is 2, --processes 2; expected 0 <= process'),
]


@pytest.mark.parametrize(('argv', 'message'), CASE_43, ids=[' '.join(argv) for argv, _ in CASE_43])
def test_train_refuses(capsys, calls, argv, message):
    assert message in refused(capsys, 'train', '--config=e.py', '--workdir=new', *argv)
    assert not calls


@pytest.mark.parametrize(('argv', 'message'), [
    ([], 'train needs --config=FILE[:ARG]'),
    (['--config=e.py'], 'train needs --workdir=DIR'),
    (['--config=e.py', '--workdir='], '--workdir expects DIR, got nothing'),
    (['--config=e.py', '--workdir'], '--workdir: expected one argument'),
    (['--config', '--workdir=new'], '--config: expected one argument'),
    (['--config=none.py', '--workdir=new'], 'there is no experiment file none.py'),
    (['--config=e.py', '--workdir=file'], '--workdir=file: file is a file, expected a folder'),
    (['--config=e.py', '--workdir=file/a/b'], '--workdir=file/a/b: file is a file, expected a folder'),
    (['--config=e.py', f'--workdir={300 * "a"}'], f'--workdir={300 * "a"}: File name too long'),
    (['--config=e.py', '--workdir=gone/a'], '--workdir=gone/a: gone is a broken link, expected a folder'),
    (['--config=e.py', '--workdir=swept'], '--workdir=swept holds a sweep; expected a new directory, or that of a run'),
])  # fmt: skip
def test_train_needs_an_experiment_and_a_folder(capsys, calls, argv, message):
    assert refused(capsys, 'train', *argv).startswith(message)
    assert not calls


HOMES = [
    (['train', '--config=~/e.py:x', '--workdir=~/new'], (1, Path('HOME/new'))),
    (['eval', '--workdir', '~/runs/one'], (0, Path('HOME/runs/one'))),
    (['aer', '--gold=~/g', '--links=~/l'], (0, 'HOME/g')),
    (['aer', '--gold=~/g', '--links=~/l'], (1, 'HOME/l')),
]


@pytest.mark.parametrize(('argv', 'expected'), HOMES, ids=[argv[0] for argv, _ in HOMES])
def test_a_path_that_starts_with_a_tilde_is_in_the_home_folder(monkeypatch, folder, calls, argv, expected):
    monkeypatch.setenv('HOME', str(folder))
    assert cli.main(argv) == 0
    at, path = expected
    assert calls[0][1][at] == type(path)(str(path).replace('HOME', str(folder)))


def test_a_home_folder_of_nobody_is_refused(capsys, calls):
    for argv in (['train', '--config=e.py', '--workdir=~no-one/new'], ['eval', '--workdir=~no-one/new']):
        assert refused(capsys, *argv) == (
            "--workdir is '~no-one/new', and there is no user 'no-one'; write ./~no-one/new for a folder ~no-one"
        )
    assert not calls


def test_an_argument_that_is_not_utf_8_is_refused_as_escapes(capsys, calls):
    for argv in (['\udcff'], ['eval', '--workdir=\udcff'], ['translate', '--workdir=runs/one', 'caf\udce9']):
        assert refused(capsys, *argv).endswith(' is not UTF-8')
    assert not calls


def test_a_folder_whose_name_is_not_utf_8_is_refused(tmp_path, monkeypatch, capsys, calls):
    (tmp_path / 'a\udcff').mkdir()
    shutil.copy('e.py', tmp_path / 'a\udcff')
    monkeypatch.chdir(tmp_path / 'a\udcff')
    said = refused(capsys, 'train', '--config=e.py', '--workdir=new')
    assert said.startswith('--config is ') and said.endswith("a\\udcff/e.py'; expected folders whose names are UTF-8")
    assert not calls


def test_control_characters_are_printed_as_escapes(capsys):
    said = refused(capsys, 'eval', '--workdir=a\x1b[2J\rb')
    assert said == r'--workdir=a\x1b[2J b does not exist; runs nearby: runs/one'
    assert refused(capsys, 'eval', '--workdir=a\0') == r"the argument '--workdir=a\x00' contains a NUL character"


# eval, translate


def test_eval(calls, capsys):
    assert cli.main(['eval', '--workdir=runs/one']) == 0
    assert cli.main(['eval', '--split=valid', '--workdir', 'runs/one']) == 0
    one, page = Path('runs/one'), ('write_run_page', (Path('runs/one'), 'valid', SCORES), {})
    assert calls == [('evaluate_run', (one, None), {}), page, ('evaluate_run', (one, 'valid'), {}), page]
    assert capsys.readouterr().out.splitlines()[:3] == [
        'bleu                12.5000  nrefs:1',
        '7 sentences, 1,234 parameters, step 9',
        'page: runs/one/report.html',
    ]


@pytest.mark.parametrize('command', [['eval'], ['translate', 'A cat.'], ['generate'], ['attend', 'A cat.']])
def test_a_run_must_exist(capsys, calls, command):
    near = '; runs nearby: runs/one'
    Path('run').mkdir()
    Path('run/config.json').write_text('{}')  # as near by name, but not inside
    assert refused(capsys, *command, '--workdir=runs/on') == f'--workdir=runs/on does not exist{near}'
    assert refused(capsys, *command, '--workdir=runs/one/x') == f'--workdir=runs/one/x does not exist{near}'
    assert refused(capsys, *command, '--workdir=runs') == f'--workdir=runs holds no run (it has no config.json){near}'
    assert refused(capsys, *command, '--workdir=file').startswith('--workdir=file is a file')
    assert refused(capsys, *command).endswith('needs --workdir=DIR')
    assert 'does not understand' in refused(capsys, *command, '--workdir=runs/one', '--config.lr=3')
    assert not calls


def test_translate(calls):
    assert cli.main(['translate', 'A cat.', '--workdir=runs/one', "- 'Un' chat", '--joined', '-5 degrees.']) == 0
    assert cli.main(['translate', '--workdir=runs/one', 'A cat.']) == 0
    assert [call for call in calls if call[0] == 'translate'] == [
        ('translate', (['A cat.', "- 'Un' chat", '-5 degrees.'], True, None, False), {}),
        ('translate', (['A cat.'], False, None, False), {}),
    ]


def pipe(monkeypatch, data: bytes, terminal: bool = False) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(data), encoding='ascii')  # the encoding of a poor locale
    monkeypatch.setattr(stdin, 'isatty', lambda: terminal, raising=False)
    monkeypatch.setattr(sys, 'stdin', stdin)


def test_sentences_from_a_pipe(monkeypatch, calls):
    pipe(monkeypatch, '\ufeffA café.\r\nTwo\u2028lines.\nLast\n'.encode())
    assert cli.main(['translate', '--workdir=runs/one']) == 0
    assert calls[-1][1][0] == ['A café.', 'Two\u2028lines.', 'Last']


@pytest.mark.parametrize(('data', 'message'), [
    (b'', 'got an empty standard input'),
    (b'A cat.\n\nA dog.\n', 'sentence 2 is empty'),
    ('A cat.\n\u200b\n'.encode(), 'sentence 2 is empty'),
    (b'A cat.\nA \x80 dog.\n', 'the standard input is not UTF-8 at line 2'),
])  # fmt: skip
def test_a_pipe_without_sentences(monkeypatch, capsys, calls, data, message):
    pipe(monkeypatch, data)
    assert refused(capsys, 'translate', '--workdir=runs/one').endswith(message)
    assert not calls


def test_translate_refuses(monkeypatch, capsys, calls):
    pipe(monkeypatch, b'A cat.\n', terminal=True)
    assert 'expects a sentence' in refused(capsys, 'translate', '--workdir=runs/one')
    for blank in (' ', '\u200b', '\ufeff', '\xad', '\x01\x7f'):
        assert refused(capsys, 'translate', '--workdir=runs/one', 'A cat.', blank) == 'sentence 2 is empty'
    assert 'did you mean --joined?' in refused(capsys, 'translate', '--workdir=runs/one', 'A cat.', '--join')
    assert 'given 2 times' in refused(capsys, 'translate', '--workdir=runs/one', 'x', '--joined', '--joined')
    assert '--joined' in refused(capsys, 'translate', '--workdir=runs/one', 'x', '--joined=yes')
    assert 'nothing after --' in refused(capsys, 'translate', '--workdir=runs/one', '--', 'x')
    assert not calls


# generate, attend, count


def test_generate(calls):
    assert cli.main(['generate', '--workdir=runs/one']) == 0
    numbers = ['--tokens=5', '--samples', '2', '--seed=-3', '--temperature=.5', '--top_k=4', '--top_p', '0.9']
    assert cli.main(['generate', '--workdir=runs/one', '--prompt=- a=b ', *numbers]) == 0
    assert [call for call in calls if call[0] == 'generate'] == [
        ('generate', ('',), {}),  # what is not given is the task's to choose
        ('generate', ('- a=b ',),
         dict(tokens=5, samples=2, seed=-3, temperature=0.5, top_k=4, top_p=0.9)),
    ]


@pytest.mark.parametrize(('argv', 'message'), [
    (['--tokens=many'], "--tokens expects a whole number, got 'many'"),
    (['--samples=2.0'], "--samples expects a whole number, got '2.0'"),
    (['--seed=1e3'], "--seed expects a whole number, got '1e3'"),
    (['--top_k='], '--top_k expects K, got nothing'),
    (['--temperature=hot'], "--temperature expects a finite number, got 'hot'"),
    (['--top_p=90%'], "--top_p expects a finite number, got '90%'"),
    (['--tokens=1', '--tokens=2'], '--tokens is given 2 times; expected once'),
    (['--prompt'], '--prompt: expected one argument'),
    (['--topk=3'], "generate does not understand '--topk=3'; did you mean --top_k?"),
    (['ROMEO:'], "generate takes only flags, got 'ROMEO:'"),
])  # fmt: skip
def test_generate_refuses(capsys, calls, argv, message):
    assert refused(capsys, 'generate', '--workdir=runs/one', *argv) == message
    assert not calls


def test_attend(calls):
    assert cli.main(['attend', 'A cat.', '--workdir=runs/one']) == 0
    assert cli.main(['attend', '--workdir=runs/one', '--layer=2', '--head', '1', 'A cat.', '-1 dogs.']) == 0
    assert [call for call in calls if call[0] == 'attend'] == [
        ('attend', ('the parameters', ['A cat.'], None, None), {}),
        ('attend', ('the parameters', ['A cat.', '-1 dogs.'], 2, 1), {}),
    ]


@pytest.mark.parametrize(('argv', 'message'), [
    ([], 'attend expects a text in quotes, an image, or several'),
    (['A cat.', ' '], 'attend expects a text in quotes, an image, or several'),
    (['\u200b'], 'attend expects a text in quotes, an image, or several'),
    (['A cat.', '--layer=last'], "--layer expects a whole number, got 'last'"),
    (['A cat.', '--head=1.5'], "--head expects a whole number, got '1.5'"),
    (['A cat.', '--heads=1'], "attend does not understand '--heads=1'; did you mean --head?"),
])  # fmt: skip
def test_attend_refuses(capsys, calls, argv, message):
    assert refused(capsys, 'attend', '--workdir=runs/one', *argv) == message
    assert not calls


def test_count(calls, capsys):
    assert cli.main(['count', '--config=e.py:x', '--config.model.layers=3']) == 0
    [(_, (config,), _), (name, args, _)] = calls
    assert (config.name, config.model.layers, name, args) == ('x', 3, 'format_costs', ('4 tokens', []))
    assert capsys.readouterr().out == 'the table\n'


@pytest.mark.parametrize(('argv', 'message'), [
    ([], 'count needs --config=FILE[:ARG]'),
    (['--config=none.py'], 'there is no experiment file none.py'),
    (['--config=e.py', '--config.model.laysers=3'], 'there is no config.model.laysers; did you mean config.model.lay'),
    (['--config=e.py', 'model.layers=3'], "count takes only flags, got 'model.layers=3'; did you mean --config.model"),
    (['--config=e.py', '--workdir=new'], "count does not understand '--workdir=new'"),
])  # fmt: skip
def test_count_refuses(capsys, calls, argv, message):
    assert refused(capsys, 'count', *argv).startswith(message)
    assert not calls


def test_a_task_without_attention_is_named(capsys, monkeypatch):
    task = types.SimpleNamespace(config=types.SimpleNamespace(task='sort'))
    monkeypatch.setattr('attnlab.train.run.load_run', lambda workdir: types.SimpleNamespace(task=task, params=None))
    assert refused(capsys, 'attend', '--workdir=runs/one', 'x') == "the task 'sort' does not attend"


def test_a_sweep_without_optuna_names_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, 'optuna', None)  # as if it were not installed
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    line = refused(capsys, 'sweep', '--config=e.py', '--sweep=x', '--workdir=new')
    assert line == "sweeps need Optuna, which is not installed; pip install 'attnlab[sweeps]' installs it"


# aer, bench


def test_aer(calls, capsys):
    assert cli.main(['aer', '--gold=g', '--links=l']) == 0
    assert cli.main(['aer', '--gold', 'g', '--links', 'l', '--swap']) == 0
    assert calls == [('score_alignment_files', ('g', 'l', False), {}), ('score_alignment_files', ('g', 'l', True), {})]
    assert capsys.readouterr().out.splitlines()[0] == 'AER 0.1250  precision 0.5000  recall 1.0000'


def test_aer_refuses(capsys):
    assert refused(capsys, 'aer', '--gold=g') == 'aer needs --links=FILE'
    assert "got 'x'" in refused(capsys, 'aer', '--gold=g', '--links=l', 'x')


def test_bench(calls, capsys):
    assert cli.main(['bench', 'seq2seq']) == 0
    assert cli.main(['bench']) == 0
    assert calls == [('main', (), {})] * (1 + len(commands.BENCHMARKS))
    assert refused(capsys, 'bench', 'seq2sec') == "there is no bench 'seq2sec'; did you mean seq2seq?"
    assert 'bench takes one of seq2seq' in refused(capsys, 'bench', 'seq2seq', 'seq2seq')
    assert refused(capsys, 'trian') == "there is no command 'trian'; did you mean train?"
    assert refused(capsys, '--versoin') == "there is no command '--versoin'; did you mean --version?"
    assert 'expected one of train' in refused(capsys, '@')
