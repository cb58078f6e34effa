"""Runs whose parameters or logits are NaN or infinite: commands fail with one line and print no result."""

import jax
import jax.numpy as jnp
import pytest

from attnlab import cli
from attnlab.errors import RunError
from attnlab.tasks.align.translator import Translator
from attnlab.tasks.language import generation
from attnlab.train import checkpoint, run

COMMANDS = [
    ('stream_run', 'generate', ['--prompt=the cat', '--tokens=3', '--temperature=0']),
    ('stream_run', 'eval', []),
    ('transformer_run', 'translate', ['the cat sleeps.']),
]


@pytest.fixture
def run_with_changed_params(request, monkeypatch, capsys):
    """Function (run fixture, command, arguments, change of each parameter) -> error line, with exit code 1."""

    def run_command(name, command, argv, change):
        workdir, restore_best = request.getfixturevalue(name), checkpoint.restore_best
        capsys.readouterr()

        def restore_changed(*args):
            restored = restore_best(*args)
            return restored._replace(params=jax.tree.map(change, restored.params))

        monkeypatch.setattr(checkpoint, 'restore_best', restore_changed)
        assert cli.main([command, f'--workdir={workdir}', *argv]) == 1
        out, error = capsys.readouterr()
        assert out == '' and error.startswith('attnlab: ') and error.count('\n') == 1
        return error

    return run_command


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'command', 'argv'), [*COMMANDS, ('transformer_run', 'attend', ['the cat sleeps.'])])
def test_nonfinite_parameters_are_refused(run_with_changed_params, name, command, argv):
    error = run_with_changed_params(name, command, argv, lambda x: x.at[(0,) * x.ndim].set(jnp.nan))
    assert 'the parameters of step ' in error and 'are not all finite' in error


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'command', 'argv'), COMMANDS)
def test_finite_parameters_with_nonfinite_logits_are_refused(run_with_changed_params, name, command, argv):
    error = run_with_changed_params(name, command, argv, lambda x: 1e30 * (1 + jnp.abs(x)))
    expected = "the loss of split 'valid' is nan" if command == 'eval' else 'the logits of token 0 are NaN or infinite'
    assert expected in error


@pytest.mark.slow
def test_translator_and_generation_refuse_nan_parameters(recurrent_run, language_model):
    """Below the commands, so that evaluations during training are protected too."""
    task, params, _ = run.load_run(recurrent_run)
    nan_params = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
    for beams in (1, 3):
        with pytest.raises(RunError, match='row 0: the logits of token 0 are NaN or infinite'):
            Translator(task.model, (12,), 1, beams).translate(nan_params, [[4, 5, 3]])
    model, params, vocabulary, _ = language_model
    nan_params = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
    with pytest.raises(RunError, match='row 0: the logits of token 0 are NaN or infinite'):
        generation.generate_texts(model, nan_params, vocabulary, 'the cat', False, tokens=3)
