"""Alignments as figures, array files and terminal text."""

import io
import itertools
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.font_manager import FontProperties, findfont
from matplotlib.ft2font import FT2Font
from PIL import Image

from attnlab.data.alignments import GoldLinks
from attnlab.tasks import heatmap
from attnlab.tasks.align import pictures
from attnlab.tasks.task import TranslatedSentence

SOURCE = ['The', 'café', 'has', 'closed', '</s>']
OUTPUT = ['le', 'café', 'fermé', '</s>']
WEIGHTS = np.array([[.9, .1, 0, 0, 0], [.05, .9, .05, 0, 0], [0, 0, .4, .6, 0], [0, 0, 0, .25, .75]])
FRENCH = "àâæçéèêëîïôœùûüÿÀÂÆÇÉÈÊËÎÏÔŒÙÛÜŸ’'«»–…</s>"


def labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def darkness(figure, T, S):
    """Return the darkness of the pixel in the middle of each cell, [T, S], from white (0) to black (1)."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., 0]
    height = pixels.shape[0]
    to_pixels = figure.axes[0].transData.transform
    centres = [[to_pixels((s, t)).astype(int) for s in range(S)] for t in range(T)]
    return np.array([[1 - pixels[height - 1 - y, x] / 255 for x, y in row] for row in centres])


def test_rows_are_produced_tokens_and_columns_are_source_tokens():
    axes = heatmap.plot_heatmap(WEIGHTS, OUTPUT, SOURCE).axes[0]
    assert labels(axes.yaxis) == OUTPUT
    assert labels(axes.xaxis) == SOURCE
    assert axes.xaxis.get_ticks_position() == 'top'


def test_weights_are_drawn_without_rescaling():
    image = heatmap.plot_heatmap(WEIGHTS, OUTPUT, SOURCE).axes[0].images[0]
    drawn = np.asarray(image.get_array())
    np.testing.assert_array_equal(drawn, WEIGHTS.astype(np.float32))
    np.testing.assert_allclose(drawn.sum(1), 1, atol=1e-6)
    assert image.get_clim() == (0, 1)


def test_cells_are_dark_where_the_weights_are():
    T, S = 4, 6
    for columns in ([0, 1, 2, 3], [5, 4, 3, 0]):  # the diagonal, and weights that differ from their transpose
        weights = np.eye(S)[columns]
        figure = heatmap.plot_heatmap(weights, list('abcd'), list('uvwxyz'))
        np.testing.assert_allclose(darkness(figure, T, S), weights, atol=0.02)


def test_first_row_is_at_the_top():
    axes = heatmap.plot_heatmap(WEIGHTS, OUTPUT, SOURCE).axes[0]
    to_pixels = axes.transData.transform
    assert to_pixels((0, 0))[1] > to_pixels((0, 3))[1]
    assert to_pixels((0, 0))[0] < to_pixels((3, 0))[0]


def test_font_has_accents_whatever_the_matplotlib_settings():
    with matplotlib.rc_context({'font.family': 'monospace'}):
        axes = heatmap.plot_heatmap(WEIGHTS, OUTPUT, SOURCE, title='cœur').axes[0]
    texts = [*axes.get_xticklabels(), *axes.get_yticklabels(), axes._left_title]
    assert {text.get_fontname() for text in texts} == {'DejaVu Sans'}
    font = FT2Font(findfont(FontProperties(family='DejaVu Sans'), fallback_to_default=False))
    assert all(font.get_char_index(ord(character)) for character in FRENCH)


def test_decomposed_accents_are_composed():
    axes = heatmap.plot_heatmap([[1.0]], ['e\u0301te\u0301'], ['\u2028x']).axes[0]
    assert labels(axes.yaxis) == ['été']
    assert labels(axes.xaxis) == [' x']


@pytest.mark.parametrize(('T', 'S'), [(5, 4), (12, 12), (40, 45), (3, 60)])
def test_labels_do_not_overlap(T, S):
    rows = ['anticonstitutionnellement'] * T
    figure = heatmap.plot_heatmap(np.full((T, S), 1 / S), rows, ['qÉg'] * S)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    axes = figure.axes[0]
    boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert all(above.y0 >= below.y1 for above, below in itertools.pairwise(boxes))
    slant = np.deg2rad(axes.get_xticklabels()[0].get_rotation())
    distance = np.diff(axes.transData.transform([(0, 0), (1, 0)])[:, 0])[0] * np.sin(slant)
    line = axes.get_xticklabels()[0]
    line.set_rotation(0)
    assert distance >= line.get_window_extent().height


@pytest.mark.parametrize(('T', 'S'), [
    (2, 5001), (10_010, 3), *(pytest.param(*size, marks=pytest.mark.slow) for size in ((1032, 512), (150, 200))),
])  # fmt: skip
def test_pixels_of_a_heatmap_are_bounded(T, S):
    weights = np.zeros((T, S))
    weights[:, 0] = 1
    data = heatmap.render_png(
        heatmap.plot_heatmap(weights, ['mot'] * T, ['word'] * S, title='le chat ' * S)
    )
    with Image.open(io.BytesIO(data)) as picture:
        assert max(picture.size) < 6000


def test_too_many_tokens_have_no_labels_and_their_number_in_the_title():
    figure = heatmap.plot_heatmap(np.full((2, 201), 1 / 201), ['a', 'b'], ['c'] * 201, title='x')
    axes = figure.axes[0]
    assert labels(axes.xaxis) == labels(axes.yaxis) == []
    assert axes.get_title(loc='left').replace('\n', ' ') == 'x (201 tokens across, 2 down: no room for labels)'
    text = heatmap.render_text(np.full((2, 201), 1 / 201), ['a', 'b'], ['c'] * 201)
    assert text == '2 produced and 201 source tokens: too many to show here or to label'
    assert labels(heatmap.plot_heatmap(np.full((2, 200), 1 / 200), ['a', 'b'], ['c'] * 200).axes[0].yaxis) == ['a', 'b']


def test_pixels_of_a_huge_figure_are_bounded():
    from matplotlib.figure import Figure

    with Image.open(io.BytesIO(heatmap.render_png(Figure(figsize=(300, 1))))) as picture:
        assert max(picture.size) < 4200


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(('T', 'S'), [(1, 1), (5, 4), (40, 45)])
def test_nothing_is_cut_off(tmp_path, T, S):
    word = 'Donaudampfschifffahrtsgesellschaft'
    heatmap.draw_heatmap(tmp_path / 'a.png', np.full((T, S), 1 / S), [word] * T, [word] * S,
                         title=f'{word} $5 {word} {word}', gold=GoldLinks(frozenset([(0, 0)]), frozenset([(0, 0)])))
    with Image.open(tmp_path / 'a.png') as picture:
        pixels = np.asarray(picture.convert('L'))
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    assert edge.min() == 255
    assert pixels.min() < 60


def test_long_labels_are_cropped():
    axes = heatmap.plot_heatmap([[1.0]], ['x' * 500], ['y' * 40]).axes[0]
    assert labels(axes.yaxis) == ['x' * 39 + '…']
    assert labels(axes.xaxis) == ['y' * 40]
    axes = heatmap.plot_heatmap([[1.0]], ['日' * 100_000], ['e\u0301q\u0301' * 50_000]).axes[0]  # in linear time
    assert labels(axes.yaxis) == ['日' * 19 + '…'] and labels(axes.xaxis) == ['éq\u0301' * 19 + 'é…']


def test_dollar_signs_are_not_mathematics():
    figure = heatmap.plot_heatmap(np.eye(2), ['$5$', '$'], ['$\\frac$', '_^'], title='$\\bad$')
    FigureCanvasAgg(figure).draw()  # mathematics that does not parse would raise
    assert labels(figure.axes[0].yaxis) == ['$5$', '$']


def test_gold_links_are_outlined_solid_if_sure_dashed_if_possible():
    gold = GoldLinks(sure=frozenset([(1, 0)]), possible=frozenset([(1, 0), (4, 2)]))
    axes = heatmap.plot_heatmap(WEIGHTS, OUTPUT, SOURCE, gold=gold).axes[0]
    styles = {(round(p.get_x() + p.get_width() / 2), round(p.get_y() + p.get_height() / 2)): p.get_linestyle()
              for p in axes.patches}
    assert styles.keys() == {(1, 0), (4, 2)}  # x is the source index
    assert styles[1, 0] in ('solid', '-')
    assert styles[4, 2] not in ('solid', '-')
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ['gold, sure', 'gold, possible']


def test_gold_link_outside_the_sentence_is_refused():
    gold = GoldLinks(sure=frozenset([(2, 4)]), possible=frozenset([(2, 4)]))
    with pytest.raises(ValueError, match=r'source 2, target 4.*5 source and 4 target'):
        heatmap.plot_heatmap(WEIGHTS, OUTPUT, SOURCE, gold=gold)


@pytest.mark.parametrize('function', [heatmap.plot_heatmap, heatmap.render_text])
def test_error_for_different_sizes_gives_both(function):
    with pytest.raises(ValueError, match=r'\(5, 4\).*\(4, 5\)'):
        function(WEIGHTS.T, OUTPUT, SOURCE)
    with pytest.raises(ValueError, match=r'\(0, 5\)'):
        function(WEIGHTS[:0], [], SOURCE)


def test_nan_weight_is_refused():
    with pytest.raises(ValueError, match='weights contain NaN or infinity'):
        heatmap.plot_heatmap(np.where(WEIGHTS == .9, np.nan, WEIGHTS), OUTPUT, SOURCE)


def test_saved_alignment_loads_unchanged(tmp_path):
    path = tmp_path / 'alignment'  # without a suffix, so that NumPy would append one
    heatmap.save_alignment(path, WEIGHTS, OUTPUT, SOURCE)
    weights, rows, columns = heatmap.load_alignment(path)
    assert weights.dtype == np.float32
    assert weights.shape == (len(OUTPUT), len(SOURCE))
    np.testing.assert_array_equal(weights, WEIGHTS.astype(np.float32))
    assert (rows, columns) == (OUTPUT, SOURCE)
    with np.load(path, allow_pickle=False) as file:
        assert {name: file[name].dtype.kind for name in file} == {'weights': 'f', 'rows': 'U', 'columns': 'U'}
    with pytest.raises(ValueError, match='the labels have shape'):
        heatmap.save_alignment(path, WEIGHTS.T, OUTPUT, SOURCE)


def test_pickled_data_are_refused(tmp_path):
    np.savez(tmp_path / 'a.npz', weights=np.eye(1), rows=np.array([['a'], 1], object), columns=np.array(['b']))
    with pytest.raises(ValueError, match='pickle'):
        heatmap.load_alignment(tmp_path / 'a.npz')


def test_text_of_a_small_alignment():
    assert heatmap.render_text(WEIGHTS, OUTPUT, SOURCE, 80, False) == '\n'.join([
        '      ╭ The',
        '      │ ╭ café',
        '      │ │ ╭ has',
        '      │ │ │ ╭ closed',
        '      │ │ │ │ ╭ </s>',
        'le    ██░░· · ·',
        'café  ░░██░░· ·',
        'fermé · · ▒▒▓▓·',
        '</s>  · · · ▒▒██',
        '',
        '      · <0.05  ░ <0.25  ▒ <0.5  ▓ <0.75  █ more'])


def test_text_narrows_cells_then_continues_below():
    assert heatmap.render_text(WEIGHTS, OUTPUT, SOURCE, 18, False).split('\n')[3:8] == [
        '      │││╭ closed', '      ││││╭ </s>', 'le    █░···', 'café  ░█░··', 'fermé ··▒▓·']
    assert heatmap.render_text(np.eye(3), list('abc'), list('xyz'), 6, False).startswith(
        '  ╭ x\n  │╭ y\na █·\nb ·█\nc ··\n\n  ╭ z\na ·\nb ·\nc █\n\n')


def test_wide_and_combining_characters_keep_columns_aligned():
    lines = heatmap.render_text(np.eye(2), ['日本', 'e\u0301x'], ['a', 'b'], 80, False).split('\n')
    assert lines[2:4] == ['日本 ██·', 'éx   · ██']
    q = 'q\u0301'  # has no composed form
    assert heatmap.render_text(np.eye(2), [q, 'qq'], ['a', 'b'], 80, False).split('\n')[2:4] == [q + '  ██·', 'qq · ██']


@pytest.mark.parametrize('width', [40, 80, 132])
@pytest.mark.parametrize(('T', 'S'), [(1, 1), (10, 12), (45, 70), (4, 200)])
def test_every_line_fits_into_the_terminal(width, T, S):
    rows, columns = ['anticonstitutionnellement'] * T, ['internationalization'] * S
    lines = heatmap.render_text(np.full((T, S), 1 / S), rows, columns, width, False).split('\n')
    assert max(map(len, lines[:-1])) <= width
    assert sum('╭' in line for line in lines) == S


def test_colours_are_backgrounds_from_dark_to_light():
    plain = heatmap.render_text([[0, 1]], ['a'], ['x', 'y'], 80, False)
    coloured = heatmap.render_text([[0, 1]], ['a'], ['x', 'y'], 80, True).split('\n')
    assert '\x1b' not in plain
    assert coloured[2] == 'a \x1b[48;2;28;30;38m  \x1b[0m\x1b[48;2;255;246;220m  \x1b[0m'


@pytest.mark.slow
def test_pyplot_is_not_imported_and_matplotlib_only_when_drawing(tmp_path):
    code = ('import sys; from attnlab.report import page; from attnlab.tasks import heatmap; '
            'assert "matplotlib" not in sys.modules; '
            f'heatmap.draw_heatmap({str(tmp_path / "a.png")!r}, [[1.0]], ["a"], ["b"]); '
            'assert not {"matplotlib.pyplot", "jax"} & set(sys.modules)')
    subprocess.run([sys.executable, '-W', 'error', '-c', code], check=True)


@pytest.mark.parametrize(('variables', 'colours'), [
    ({'TERM': 'xterm'}, True), ({'TERM': 'xterm', 'NO_COLOR': ''}, True), ({'TERM': 'xterm', 'NO_COLOR': '1'}, False),
    ({'TERM': 'dumb'}, False),
])  # fmt: skip
def test_alignment_on_a_terminal_has_colours_unless_turned_off(
    tmp_path, monkeypatch, capsys, variables, colours
):
    monkeypatch.delenv('NO_COLOR', raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr('sys.stdout.isatty', lambda: True)
    weights = np.eye(2, dtype=np.float32)
    translated = TranslatedSentence('A cat', 'Un chat', weights, ['un', 'chat'], ['a', 'cat'])
    pictures.show_alignment(tmp_path, translated)
    assert ('\x1b[' in capsys.readouterr().out) == colours
