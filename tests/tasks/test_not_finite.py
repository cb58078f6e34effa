"""Runs whose parameters or logits are not numbers: commands refuse in one line and invent no text."""

import jax
import jax.numpy as jnp
import pytest

from attnlab import cli
from attnlab.errors import RunError
from attnlab.tasks.align.translator import Translator
from attnlab.tasks.language import generation
from attnlab.train import checkpoint, run

COMMANDS = [
    ('stream', 'generate', ['--prompt=the cat', '--tokens=3', '--temperature=0']),
    ('stream', 'eval', []),
    ('translating', 'translate', ['the cat sleeps.']),
]


@pytest.fixture
def refused(request, monkeypatch, capsys):
    """(run, command, arguments, change of every parameter) -> its one line on the screen, with exit code 1."""

    def tried(name, command, argv, change):
        workdir, best = request.getfixturevalue(name), checkpoint.restore_best
        capsys.readouterr()

        def changed(*args):
            found = best(*args)
            return found._replace(params=jax.tree.map(change, found.params))

        monkeypatch.setattr(checkpoint, 'restore_best', changed)
        assert cli.main([command, f'--workdir={workdir}', *argv]) == 1
        out, error = capsys.readouterr()
        assert out == '' and error.startswith('attnlab: ') and error.count('\n') == 1
        return error

    return tried


@pytest.mark.parametrize(('name', 'command', 'argv'), [*COMMANDS, ('translating', 'attend', ['the cat sleeps.'])])
def test_parameters_that_are_not_finite_are_refused(refused, name, command, argv):
    error = refused(name, command, argv, lambda x: x.at[(0,) * x.ndim].set(jnp.nan))
    assert 'the parameters of step ' in error and 'are not all finite' in error


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'command', 'argv'), COMMANDS)
def test_finite_parameters_whose_logits_are_not_are_refused(refused, name, command, argv):
    error = refused(name, command, argv, lambda x: 1e30 * (1 + jnp.abs(x)))
    expected = "the loss of split 'valid' is nan" if command == 'eval' else 'the logits of token 0 are NaN or infinite'
    assert expected in error


@pytest.mark.slow
def test_beams_and_greedy_decoding_of_a_task_refuse_nan(tiny, speaker):
    """Below the commands, so that an evaluation in the middle of a training does, too."""
    task, params, _ = run.load_run(tiny)
    spoilt = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
    for beams in (1, 3):
        with pytest.raises(RunError, match='row 0: the logits of token 0 are NaN or infinite'):
            Translator(task.model, (12,), 1, beams).translate(spoilt, [[4, 5, 3]])
    model, params, vocabulary, _ = speaker
    spoilt = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
    with pytest.raises(RunError, match='row 0: the logits of token 0 are NaN or infinite'):
        generation.generate_texts(model, spoilt, vocabulary, 'the cat', False, tokens=3)
