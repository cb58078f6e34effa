"""attnlab used from Python: its exports, trained runs, and the examples of docs/library.md."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import attnlab
from attnlab.api import api_markdown
from attnlab.errors import UserError
from tests.tiny import tiny_digits_config, tiny_grammar_config, tiny_language_config

ROOT = Path(attnlab.__file__).resolve().parents[1]
CODE = re.findall(r'```python\n(.*?)```', (ROOT / 'docs/library.md').read_text('utf-8'), flags=re.S)


def test_exports_agree_with_the_static_imports():
    tree = ast.parse(Path(attnlab.__file__).read_text('utf-8'))
    (static,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(static)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    exported = {
        name: (f'attnlab.{module}', attnlab.RENAMED.get(name, name))
        for module, names in attnlab.EXPORTS.items()
        for name in names
    }
    assert exported == imported
    assert sorted(exported) == sorted(attnlab.__all__)
    assert set(attnlab.__all__) <= set(dir(attnlab))
    for name in attnlab.__all__:
        assert callable(getattr(attnlab, name)), name
    with pytest.raises(AttributeError, match="'attnlab' has no attribute 'no_such_name'"):
        attnlab.no_such_name  # noqa: B018


def test_importing_attnlab_does_not_import_jax():
    program = (
        'import sys, attnlab, attnlab.train; assert callable(attnlab.train) and not {"jax", "flax"} & {*sys.modules}'
    )
    subprocess.run([sys.executable, '-c', program], check=True)


def test_the_api_page_is_current():
    assert (ROOT / 'docs/api.md').read_text('utf-8') == api_markdown(), 'python -m attnlab.api > docs/api.md'


@pytest.mark.slow
def test_the_example_of_training(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = CODE[0].replace('20_000', '128').replace('400 steps', '4 steps').replace('200 steps', '2 steps')
    code = code.replace('50 steps', '1 steps').replace('=64', '=8').replace('=128', '=8')
    *statements, last = ast.parse(code).body
    names = {}
    exec(compile(ast.Module(statements, []), 'docs/library.md', 'exec'), names)
    shown = eval(compile(ast.Expression(last.value), 'docs/library.md', 'eval'), names)
    bleu, text = capsys.readouterr().out.splitlines()
    run, translated = names['run'], names['translated']
    assert float(bleu) >= 0 and text == translated.text and run.config == names['config'] and run.step in (2, 4)
    assert translated.source == 'the small black cat sees the old teacher.'
    assert len(translated.columns) == 10 and translated.columns[-1] == '</s>'
    assert translated.weights.shape == (len(translated.rows), len(translated.columns))
    np.testing.assert_allclose(translated.weights.sum(axis=1), 1, atol=1e-5)
    assert shown._repr_html_().startswith('<img src="data:image/png;base64,iVBOR')
    assert '</s>' in repr(shown)
    shown.save(tmp_path / 'alignment.png')
    assert (tmp_path / 'alignment.png').read_bytes() == shown.png()
    maps = run.attention_maps('the cat sleeps.')
    assert set(maps.weights) <= set(maps.labels)  # a recurrent model has one kind
    with pytest.raises(UserError, match="the task 'align' does not generate"):
        run.generate('x')


@pytest.mark.slow
def test_the_example_of_kernels_and_modules():
    code = CODE[2].replace('4096', '32').replace('3000', '20').replace('512', '16')
    names = {}
    exec(compile(code, 'docs/library.md', 'exec'), names)
    assert names['out'].shape == names['query'].shape and names['y'].shape == names['x'].shape


def test_a_language_model(tmp_path):
    config = tiny_language_config(tmp_path / 'data', train__duration='2 steps', train__eval_every='2 steps')
    assert set(attnlab.train(config, tmp_path / 'run')) >= {'loss', 'step'}
    run = attnlab.load(str(tmp_path / 'run'))
    one, two = run.generate('the cat', tokens=5, samples=2, seed=1)
    assert one.startswith('the cat') and len(one) == len('the cat') + 5 and [one, two] == run.generate(
        'the cat', tokens=5, samples=2, seed=1
    )
    maps = run.attention_maps('the dog')
    assert maps.weights['attention'].shape == (1, 2, 7, 7) and maps.labels['attention'] == (list('the␣dog'),) * 2
    for name, arguments in (('translate', ['x']), ('classify', [np.zeros((1, 8, 8, 1), np.uint8)])):
        with pytest.raises(UserError, match=f"the task 'language' does not {name}"):
            getattr(run, name)(*arguments)


@pytest.mark.slow
def test_a_classifier(tmp_path):
    attnlab.train(tiny_digits_config(train__duration='2 steps', train__eval_every='2 steps'), tmp_path)
    run = attnlab.load(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 1), np.uint8)
    probabilities = run.classify(pixels)
    assert probabilities.shape == (3, 10) and probabilities.dtype == np.float64
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(run.classify(pixels[1:2])[0], probabilities[1], atol=1e-6)
    assert run.attention_maps('3').weights['attention'].ndim == 4
    assert run.evaluate()['accuracy'] == run.evaluate('test')['accuracy']
    for wrong in (pixels[0], pixels.astype(np.float32), pixels[:, :8]):
        with pytest.raises(ValueError, match=re.escape('expected uint8 [n, 16, 16, 1]')):
            run.classify(wrong)


def test_show_refuses_weights_that_do_not_fit_their_labels():
    with pytest.raises(ValueError, match=r'shape \(2, 2\)'):
        attnlab.show(np.zeros((2, 2)), ['a'], ['b', 'c'])
    with pytest.raises(ValueError, match='NaN or infinity'):
        attnlab.show(jnp.full((1, 1), jnp.nan), ['a'], ['b'])


@pytest.mark.slow
def test_layer_options_of_translate_need_a_transformer(tmp_path):
    attnlab.train(tiny_grammar_config(train__duration='2 steps', train__eval_every='2 steps'), tmp_path)
    with pytest.raises(UserError, match='need a transformer'):
        attnlab.load(tmp_path).translate(['A cat.'], layer=1)
