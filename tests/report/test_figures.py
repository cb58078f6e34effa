"""Figures of a run: training curves, and BLEU by length."""

import io

import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image

from attnlab.report import figures
from attnlab.tasks import heatmap

TRAIN = [{'step': step, 'split': 'train', 'loss': 5 / step} for step in (1, 2, 3, 4)]
VALID = [{'step': 2, 'split': 'valid', 'loss': 3.0, 'bleu': 10.0},
         {'step': 4, 'split': 'valid', 'loss': 2.0, 'bleu': 20.0}]
BINS = [{'from': 1, 'to': 10, 'sentences': 1200, 'bleu': 50.0}, {'from': 11, 'to': None, 'sentences': 7, 'bleu': 40.0}]


def lines(axes):
    return {line.get_label(): np.stack(line.get_data(), 1).tolist() for line in axes.get_lines()}


def test_curves_have_the_points_of_the_records():
    loss, bleu = figures.plot_training_curves(
        {'run': TRAIN + VALID + [{'step': 3, 'split': 'speed', 'loss': 9.0}]}
    ).axes
    assert lines(loss) == {'training': [[1, 5], [2, 2.5], [3, 5 / 3], [4, 1.25]], 'validation': [[2, 3], [4, 2]]}
    assert lines(bleu) == {'validation': [[2, 10], [4, 20]]}


def test_score_with_an_unknown_name_has_a_panel():
    own = [{**record, 'own': 0.5, 'perplexity': 9.0} for record in VALID]
    panels = figures.plot_training_curves({'run': TRAIN + own}).axes
    assert [axes.get_title(loc='left') for axes in panels] == ['loss', 'validation BLEU', 'validation own']
    assert lines(panels[2]) == {'validation': [[2, 0.5], [4, 0.5]]}


def test_last_record_of_a_step_counts_and_steps_are_sorted():
    again = [{'step': 4, 'split': 'train', 'loss': 7.0}, {'step': 0, 'split': 'train', 'loss': 8.0},
             {'step': 5, 'split': 'train', 'loss': None}]
    (loss,) = figures.plot_training_curves({'run': TRAIN + again}).axes  # without BLEU there is no panel for it
    assert lines(loss)['training'] == [[0, 8], [1, 5], [2, 2.5], [3, 5 / 3], [4, 7]]


def test_curves_of_several_runs_are_named():
    loss, _ = figures.plot_training_curves({'a': TRAIN + VALID, 'b': VALID}).axes
    assert list(lines(loss)) == ['a, training', 'a, validation', 'b, validation']
    colours = {line.get_label(): line.get_color() for line in loss.get_lines()}
    assert colours['a, training'] == colours['a, validation'] != colours['b, validation']


@pytest.mark.parametrize('names', [['_a', '$a$'], [r'$\frac$', '$'], ['__', r'\$x$']])
def test_run_names_are_drawn_unchanged(names):
    for picture, expected in (
        (figures.plot_training_curves({name: TRAIN for name in names}), [f'{name}, training' for name in names]),
        (figures.plot_bleu_by_length({name: BINS for name in names}), names),
    ):
        heatmap.render_png(picture)  # mathematics that does not parse would raise
        texts = picture.axes[0].get_legend().get_texts()
        assert [text.get_text() for text in texts] == expected
        assert not any(text.get_parse_math() for text in picture.findobj(Text))


def test_run_without_records_has_an_empty_panel():
    assert len(figures.plot_training_curves({'run': []}).axes) == 1


def test_bars_are_at_their_length_range():
    other = [{**BINS[0], 'bleu': 30.0}, {**BINS[1], 'bleu': None}]
    axes = figures.plot_bleu_by_length({'attention': BINS, 'fixed': other}).axes[0]
    heights = {bars.get_label(): {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in bars}
               for bars in axes.containers}
    assert heights == {'attention': {0: 50, 1: 40}, 'fixed': {0: 30}}
    assert [label.get_text() for label in axes.get_xticklabels()] == ['1–10', '11+']
    assert {'n = 1,200', 'n = 7'} <= {text.get_text() for text in axes.texts}


def test_png_is_small_and_keeps_its_colours():
    data = heatmap.render_png(figures.plot_bleu_by_length({'attention': BINS}))
    with Image.open(io.BytesIO(data)) as picture:
        assert picture.format == 'PNG'
        assert len(data) < 40_000
        colours = {colour for _, colour in picture.convert('RGB').getcolors()}
    assert (255, 255, 255) in colours
    blue = tuple(int(figures.COLOURS[0][i:i + 2], 16) for i in (1, 3, 5))
    assert min(max(abs(np.subtract(blue, colour))) for colour in colours) <= 2
