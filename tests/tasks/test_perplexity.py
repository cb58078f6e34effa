"""The perplexity of a loss that has left all bounds is infinite: it ends a run in one line, and no traceback."""

import math

import pytest

from attnlab.errors import RunError
from attnlab.tasks import create_task
from attnlab.tasks.align.task import AlignTask
from attnlab.tasks.align.translator import Translation, Translator
from attnlab.tasks.task import perplexity
from attnlab.train import run
from tests.tiny import tiny_grammar_config


def test_perplexity():
    assert [perplexity(loss) for loss in (0.0, 709.0, 710.0, math.inf)] == [1.0, math.exp(709.0), math.inf, math.inf]
    assert math.isnan(perplexity(math.nan))


@pytest.fixture
def diverged(monkeypatch):
    """Models whose loss is 22,000 nats a token, as after a few steps with a learning rate of 300."""
    score = lambda self, params, source, target: (22_000.0 * len(target), len(target), [])
    translate = lambda self, params, source: [Translation([], None) for _ in source]
    monkeypatch.setattr(Translator, 'score_translations', score)
    monkeypatch.setattr(Translator, 'translate_greedily', translate)


def test_a_diverged_alignment_model_has_scores(diverged):
    scores = create_task(tiny_grammar_config()).validate(None)
    assert scores['loss'] == 22_000 and scores['perplexity'] == math.inf


def test_the_scores_of_a_diverged_run_are_refused_by_name(tiny, monkeypatch):
    monkeypatch.setattr(AlignTask, 'evaluate', lambda *args: {'loss': 22_000.0, 'perplexity': math.inf})
    match = "the perplexity of split 'other' is inf: the parameters of step .* have diverged"
    with pytest.raises(RunError, match=match):
        run.evaluate_run(tiny, 'other')
    assert not (tiny / 'scores-other.json').exists()
