"""The perplexity of a very large loss is infinity, and a run that has diverged fails with one line, not a traceback."""

import math

import pytest

from attnlab.errors import RunError
from attnlab.tasks import create_task
from attnlab.tasks.align.task import AlignTask
from attnlab.tasks.align.translator import Translation, Translator
from attnlab.tasks.task import perplexity
from attnlab.train import run
from tests.tiny import tiny_grammar_config


def test_perplexity_is_exp_of_the_loss_or_infinity():
    assert [perplexity(loss) for loss in (0.0, 709.0, 710.0, math.inf)] == [1.0, math.exp(709.0), math.inf, math.inf]
    assert math.isnan(perplexity(math.nan))


@pytest.fixture
def diverged(monkeypatch):
    """Make every loss 22,000 nats per token, as after a few steps with a learning rate of 300."""
    score = lambda self, params, source, target: (22_000.0 * len(target), len(target), [])
    translate = lambda self, params, source: [Translation([], None) for _ in source]
    monkeypatch.setattr(Translator, 'score_translations', score)
    monkeypatch.setattr(Translator, 'translate_greedily', translate)


def test_validation_of_a_diverged_model_returns_infinite_perplexity(diverged):
    scores = create_task(tiny_grammar_config()).validate(None)
    assert scores['loss'] == 22_000 and scores['perplexity'] == math.inf


def test_evaluation_of_a_diverged_run_names_the_infinite_score(recurrent_run, monkeypatch):
    monkeypatch.setattr(AlignTask, 'evaluate', lambda *args: {'loss': 22_000.0, 'perplexity': math.inf})
    match = "the perplexity of split 'other' is inf: the parameters of step .* have diverged"
    with pytest.raises(RunError, match=match):
        run.evaluate_run(recurrent_run, 'other')
    assert not (recurrent_run / 'scores-other.json').exists()
