"""The grammar experiments with their own settings; a few minutes on two cores."""

import json

import pytest

from attnlab import cli


@pytest.mark.slow
@pytest.mark.parametrize('experiment', ['grammar_gru', 'grammar_transformer'])
def test_grammar_experiment_learns_translation_and_alignment(experiment, tmp_path):
    workdir = tmp_path / 'run'
    assert cli.main(['train', f'--config=experiments/align/{experiment}.py', f'--workdir={workdir}']) == 0
    assert cli.main(['eval', f'--workdir={workdir}', '--split=test']) == 0
    scores = json.loads((workdir / 'scores-test.json').read_text())
    assert scores['bleu'] >= 95
    assert scores['aer_emit'] <= 0.10
    # A French adjective after its noun attends to the English adjective before its noun.
    assert scores['inversion_emit'] >= 0.95
