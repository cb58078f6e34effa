"""Alignments as pictures, arrays and terminal text."""

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

SOURCE = ['The', 'café', 'has', 'closed', '</s>']
OUTPUT = ['le', 'café', 'fermé', '</s>']
STUB = np.array([[.9, .1, 0, 0, 0], [.05, .9, .05, 0, 0], [0, 0, .4, .6, 0], [0, 0, 0, .25, .75]])
FRENCH = "àâæçéèêëîïôœùûüÿÀÂÆÇÉÈÊËÎÏÔŒÙÛÜŸ’'«»–…</s>"


def labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def darkness(picture, steps, length):
    """[steps, length]: how dark the pixel in the middle of each cell is, 0 white to 1 black."""
    canvas = FigureCanvasAgg(picture)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., 0]
    height = pixels.shape[0]
    place = picture.axes[0].transData.transform
    middle = [[place((s, t)).astype(int) for s in range(length)] for t in range(steps)]
    return np.array([[1 - pixels[height - 1 - y, x] / 255 for x, y in row] for row in middle])


def test_rows_are_produced_tokens_and_columns_source_tokens():
    axes = heatmap.plot_heatmap(STUB, OUTPUT, SOURCE).axes[0]
    assert labels(axes.yaxis) == OUTPUT
    assert labels(axes.xaxis) == SOURCE
    assert axes.xaxis.get_ticks_position() == 'top'


def test_weights_are_drawn_as_they_are():
    image = heatmap.plot_heatmap(STUB, OUTPUT, SOURCE).axes[0].images[0]
    drawn = np.asarray(image.get_array())
    np.testing.assert_array_equal(drawn, STUB.astype(np.float32))
    np.testing.assert_allclose(drawn.sum(1), 1, atol=1e-6)
    assert image.get_clim() == (0, 1)


def test_forced_links_are_dark_where_they_belong():
    steps, length = 4, 6
    for columns in ([0, 1, 2, 3], [5, 4, 3, 0]):  # a diagonal, and one that is not its own transpose
        weights = np.eye(length)[columns]
        picture = heatmap.plot_heatmap(weights, list('abcd'), list('uvwxyz'))
        np.testing.assert_allclose(darkness(picture, steps, length), weights, atol=0.02)


def test_first_row_is_on_top():
    axes = heatmap.plot_heatmap(STUB, OUTPUT, SOURCE).axes[0]
    place = axes.transData.transform
    assert place((0, 0))[1] > place((0, 3))[1]
    assert place((0, 0))[0] < place((3, 0))[0]


def test_accents_have_glyphs_whatever_the_user_prefers():
    with matplotlib.rc_context({'font.family': 'monospace'}):
        axes = heatmap.plot_heatmap(STUB, OUTPUT, SOURCE, title='cœur').axes[0]
    texts = [*axes.get_xticklabels(), *axes.get_yticklabels(), axes._left_title]
    assert {text.get_fontname() for text in texts} == {'DejaVu Sans'}
    font = FT2Font(findfont(FontProperties(family='DejaVu Sans'), fallback_to_default=False))
    assert all(font.get_char_index(ord(character)) for character in FRENCH)


def test_a_decomposed_accent_is_composed():
    axes = heatmap.plot_heatmap([[1.0]], ['e\u0301te\u0301'], ['\u2028x']).axes[0]
    assert labels(axes.yaxis) == ['été']
    assert labels(axes.xaxis) == [' x']


@pytest.mark.parametrize(('steps', 'length'), [(5, 4), (12, 12), (40, 45), (3, 60)])
def test_labels_never_overlap(steps, length):
    rows = ['anticonstitutionnellement'] * steps
    picture = heatmap.plot_heatmap(np.full((steps, length), 1 / length), rows, ['qÉg'] * length)
    canvas = FigureCanvasAgg(picture)
    canvas.draw()
    axes = picture.axes[0]
    boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert all(above.y0 >= below.y1 for above, below in itertools.pairwise(boxes))
    slant = np.deg2rad(axes.get_xticklabels()[0].get_rotation())
    distance = np.diff(axes.transData.transform([(0, 0), (1, 0)])[:, 0])[0] * np.sin(slant)
    line = axes.get_xticklabels()[0]
    line.set_rotation(0)
    assert distance >= line.get_window_extent().height


@pytest.mark.parametrize(('steps', 'length'), [
    (2, 5001), (10_010, 3), *(pytest.param(*size, marks=pytest.mark.slow) for size in ((1032, 512), (150, 200))),
])  # fmt: skip
def test_the_pixels_of_a_picture_are_bounded(steps, length):
    weights = np.zeros((steps, length))
    weights[:, 0] = 1
    data = heatmap.render_png(
        heatmap.plot_heatmap(weights, ['mot'] * steps, ['word'] * length, title='le chat ' * length)
    )
    with Image.open(io.BytesIO(data)) as picture:
        assert max(picture.size) < 6000


def test_more_tokens_than_labels_can_be_read_of_have_their_number_in_the_title():
    picture = heatmap.plot_heatmap(np.full((2, 201), 1 / 201), ['a', 'b'], ['c'] * 201, title='x')
    axes = picture.axes[0]
    assert labels(axes.xaxis) == labels(axes.yaxis) == []
    assert axes.get_title(loc='left').replace('\n', ' ') == 'x (201 tokens across, 2 down: no room for labels)'
    text = heatmap.render_text(np.full((2, 201), 1 / 201), ['a', 'b'], ['c'] * 201)
    assert text == '2 produced and 201 source tokens: too many to show here or to label'
    assert labels(heatmap.plot_heatmap(np.full((2, 200), 1 / 200), ['a', 'b'], ['c'] * 200).axes[0].yaxis) == ['a', 'b']


def test_a_figure_of_any_size_is_a_png_of_bounded_size():
    from matplotlib.figure import Figure

    with Image.open(io.BytesIO(heatmap.render_png(Figure(figsize=(300, 1))))) as picture:
        assert max(picture.size) < 4200


@pytest.mark.parametrize(('steps', 'length'), [(1, 1), (5, 4), (40, 45)])
def test_nothing_is_cut_off(tmp_path, steps, length):
    word = 'Donaudampfschifffahrtsgesellschaft'
    heatmap.draw_heatmap(tmp_path / 'a.png', np.full((steps, length), 1 / length), [word] * steps, [word] * length,
                 title=f'{word} $5 {word} {word}', gold=GoldLinks(frozenset([(0, 0)]), frozenset([(0, 0)])))
    with Image.open(tmp_path / 'a.png') as picture:
        pixels = np.asarray(picture.convert('L'))
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    assert edge.min() == 255
    assert pixels.min() < 60


def test_a_label_of_a_page_is_cropped():
    axes = heatmap.plot_heatmap([[1.0]], ['x' * 500], ['y' * 40]).axes[0]
    assert labels(axes.yaxis) == ['x' * 39 + '…']
    assert labels(axes.xaxis) == ['y' * 40]
    axes = heatmap.plot_heatmap([[1.0]], ['日' * 100_000], ['e\u0301q\u0301' * 50_000]).axes[0]  # in linear time
    assert labels(axes.yaxis) == ['日' * 19 + '…'] and labels(axes.xaxis) == ['éq\u0301' * 19 + 'é…']


def test_dollars_are_not_mathematics():
    picture = heatmap.plot_heatmap(np.eye(2), ['$5$', '$'], ['$\\frac$', '_^'], title='$\\bad$')
    FigureCanvasAgg(picture).draw()  # mathematics that does not parse would raise
    assert labels(picture.axes[0].yaxis) == ['$5$', '$']


def test_gold_links_are_outlined_sure_solid_possible_dashed():
    gold = GoldLinks(sure=frozenset([(1, 0)]), possible=frozenset([(1, 0), (4, 2)]))
    axes = heatmap.plot_heatmap(STUB, OUTPUT, SOURCE, gold=gold).axes[0]
    found = {(round(p.get_x() + p.get_width() / 2), round(p.get_y() + p.get_height() / 2)): p.get_linestyle()
             for p in axes.patches}
    assert found.keys() == {(1, 0), (4, 2)}  # x is the source index
    assert found[1, 0] in ('solid', '-')
    assert found[4, 2] not in ('solid', '-')
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ['gold, sure', 'gold, possible']


def test_a_link_outside_the_sentence_is_refused():
    gold = GoldLinks(sure=frozenset([(2, 4)]), possible=frozenset([(2, 4)]))
    with pytest.raises(ValueError, match=r'source 2, target 4.*5 source and 4 target'):
        heatmap.plot_heatmap(STUB, OUTPUT, SOURCE, gold=gold)


@pytest.mark.parametrize('make', [heatmap.plot_heatmap, heatmap.render_text])
def test_sizes_that_disagree_name_both(make):
    with pytest.raises(ValueError, match=r'\(5, 4\).*\(4, 5\)'):
        make(STUB.T, OUTPUT, SOURCE)
    with pytest.raises(ValueError, match=r'\(0, 5\)'):
        make(STUB[:0], [], SOURCE)


def test_a_weight_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match='weights contain NaN or infinity'):
        heatmap.plot_heatmap(np.where(STUB == .9, np.nan, STUB), OUTPUT, SOURCE)


def test_arrays_come_back_as_saved(tmp_path):
    path = tmp_path / 'alignment'  # no suffix: the path given is the path written
    heatmap.save_alignment(path, STUB, OUTPUT, SOURCE)
    weights, rows, columns = heatmap.load_alignment(path)
    assert weights.dtype == np.float32
    assert weights.shape == (len(OUTPUT), len(SOURCE))
    np.testing.assert_array_equal(weights, STUB.astype(np.float32))
    assert (rows, columns) == (OUTPUT, SOURCE)
    with np.load(path, allow_pickle=False) as file:
        assert {name: file[name].dtype.kind for name in file} == {'weights': 'f', 'rows': 'U', 'columns': 'U'}
    with pytest.raises(ValueError, match='the labels have shape'):
        heatmap.save_alignment(path, STUB.T, OUTPUT, SOURCE)


def test_nothing_pickled_is_read(tmp_path):
    np.savez(tmp_path / 'a.npz', weights=np.eye(1), rows=np.array([['a'], 1], object), columns=np.array(['b']))
    with pytest.raises(ValueError, match='pickle'):
        heatmap.load_alignment(tmp_path / 'a.npz')


def test_text_of_a_small_alignment():
    assert heatmap.render_text(STUB, OUTPUT, SOURCE, 80, False) == '\n'.join([
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


def test_text_narrows_its_cells_then_continues_below():
    assert heatmap.render_text(STUB, OUTPUT, SOURCE, 18, False).split('\n')[3:8] == [
        '      │││╭ closed', '      ││││╭ </s>', 'le    █░···', 'café  ░█░··', 'fermé ··▒▓·']
    assert heatmap.render_text(np.eye(3), list('abc'), list('xyz'), 6, False).startswith(
        '  ╭ x\n  │╭ y\na █·\nb ·█\nc ··\n\n  ╭ z\na ·\nb ·\nc █\n\n')


def test_wide_and_combining_characters_keep_the_columns():
    lines = heatmap.render_text(np.eye(2), ['日本', 'e\u0301x'], ['a', 'b'], 80, False).split('\n')
    assert lines[2:4] == ['日本 ██·', 'éx   · ██']
    q = 'q\u0301'  # has no composed form
    assert heatmap.render_text(np.eye(2), [q, 'qq'], ['a', 'b'], 80, False).split('\n')[2:4] == [q + '  ██·', 'qq · ██']


@pytest.mark.parametrize('width', [40, 80, 132])
@pytest.mark.parametrize(('steps', 'length'), [(1, 1), (10, 12), (45, 70), (4, 200)])
def test_every_line_fits_the_terminal(width, steps, length):
    rows, columns = ['anticonstitutionnellement'] * steps, ['internationalization'] * length
    lines = heatmap.render_text(np.full((steps, length), 1 / length), rows, columns, width, False).split('\n')
    assert max(map(len, lines[:-1])) <= width
    assert sum('╭' in line for line in lines) == length


def test_colour_is_a_background_from_dark_to_light():
    plain = heatmap.render_text([[0, 1]], ['a'], ['x', 'y'], 80, False)
    coloured = heatmap.render_text([[0, 1]], ['a'], ['x', 'y'], 80, True).split('\n')
    assert '\x1b' not in plain
    assert coloured[2] == 'a \x1b[48;2;28;30;38m  \x1b[0m\x1b[48;2;255;246;220m  \x1b[0m'


def test_pyplot_is_never_loaded_nor_matplotlib_before_it_draws(tmp_path):
    code = ('import sys; from attnlab.report import page; from attnlab.tasks import heatmap; '
            'assert "matplotlib" not in sys.modules; '
            f'heatmap.draw_heatmap({str(tmp_path / "a.png")!r}, [[1.0]], ["a"], ["b"]); '
            'assert not {"matplotlib.pyplot", "jax"} & set(sys.modules)')
    subprocess.run([sys.executable, '-W', 'error', '-c', code], check=True)


@pytest.mark.parametrize(('variables', 'colours'), [
    ({'TERM': 'xterm'}, True), ({'TERM': 'xterm', 'NO_COLOR': ''}, True), ({'TERM': 'xterm', 'NO_COLOR': '1'}, False),
    ({'TERM': 'dumb'}, False),
])  # fmt: skip
def test_a_translation_on_a_terminal_has_colours_unless_they_are_not_wanted(
    tmp_path, monkeypatch, capsys, variables, colours
):
    monkeypatch.delenv('NO_COLOR', raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr('sys.stdout.isatty', lambda: True)
    weights = np.eye(2, dtype=np.float32)
    pictures.show_alignment(tmp_path, 'A cat', weights, ['un', 'chat'], ['a', 'cat'], 'Un chat')
    assert ('\x1b[' in capsys.readouterr().out) == colours
