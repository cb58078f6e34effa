"""A working folder, and stubs of everything that the commands call."""

import sys
import types
from dataclasses import make_dataclass
from pathlib import Path

import pytest

from attnlab import commands
from tests import toy
from tests.cli.helpers import SCORES

Scores = make_dataclass('Scores', ['aer', 'precision', 'recall'])


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working folder with an experiment and a run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', [*sys.path])
    monkeypatch.delitem(sys.modules, 'cli_task', raising=False)
    toy.write()
    Path('file').write_text('x')
    Path('gone').symlink_to('nowhere')
    Path('swept').mkdir()
    Path('swept/sweep.json').write_text('{}')
    Path('runs/one').mkdir(parents=True)
    Path('runs/one/config.json').write_text('{}')
    return tmp_path


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The calls (name, args, kwargs) that a command made to the packages below."""
    found = []

    def recorder(name, result):
        return lambda *args, **kw: found.append((name, args, kw)) or result

    def stub(module, **functions):
        fake = types.ModuleType(module)
        for name, result in functions.items():
            setattr(fake, name, recorder(name, result))
        monkeypatch.setitem(sys.modules, module, fake)
        parent, _, name = module.rpartition('.')
        monkeypatch.setattr(sys.modules[parent], name, fake, raising=False)

    import attnlab.data

    assert attnlab.data is sys.modules['attnlab.data']
    import attnlab.report.page
    import attnlab.tasks.align
    import attnlab.train

    task = types.SimpleNamespace(**{name: recorder(name, None) for name in ('attend', 'attention_maps')})
    methods = {name: recorder(name, []) for name in ('translate', 'generate')}
    run = types.SimpleNamespace(task=task, params='the parameters', **methods)
    trained, scored = {'step': 9, 'bleu': 12.5}, ('valid', SCORES)
    stub('attnlab.train.run', train_run=trained, evaluate_run=scored, load_run=run)
    stub('attnlab.tasks.align.pictures', show_alignment=None)
    stub('attnlab.report.page', write_run_page='runs/one/report.html')
    stub('attnlab.train.count', count_costs=('4 tokens', []), format_costs='the table')
    stub('attnlab.data.alignments', score_alignment_files=Scores(0.125, 0.5, 1.0))
    stub('attnlab.bench', __path__=[])
    for name in commands.BENCHMARKS:
        stub(f'attnlab.bench.{name}', main=None)
    return found
