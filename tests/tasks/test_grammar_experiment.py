"""The grammar's experiments as they stand: minutes on two cores."""

import json

import pytest

from attnlab import cli


@pytest.mark.slow
@pytest.mark.parametrize('experiment', ['grammar_gru', 'grammar_transformer'])
def test_attention_learns_the_language_and_its_alignment(experiment, tmp_path):
    workdir = tmp_path / 'run'
    assert cli.main(['train', f'--config=experiments/align/{experiment}.py', f'--workdir={workdir}']) == 0
    assert cli.main(['eval', f'--workdir={workdir}', '--split=test']) == 0
    scores = json.loads((workdir / 'scores-test.json').read_text())
    assert scores['bleu'] >= 95
    assert scores['aer_emit'] <= 0.10
    # The French adjective behind its noun looks back at the English one in front of it: the reversed block.
    assert scores['inversion_emit'] >= 0.95
