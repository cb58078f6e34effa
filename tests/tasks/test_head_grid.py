"""Figures of every layer and head, from known attention weights."""

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from attnlab.errors import UserError
from attnlab.tasks import head_grid, heatmap

ROWS, COLUMNS = ['le', 'café', '</s>'], ['The', 'café', 'closed', '</s>']
# Six heads; head n has its only weight in row n % 3, column n % 4, so that no head equals its transpose.
HEADS = np.zeros((6, 3, 4), np.float32)
for head in range(6):
    HEADS[head, head % 3, head % 4] = 1


def labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def test_each_head_has_a_panel_with_its_weights():
    figure = head_grid.plot_head_grid(HEADS, ROWS, COLUMNS, 'decoder, layer 2')
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc='left') for axes in panels] == [f'head {number}' for number in range(1, 7)]
    for axes, weights in zip(panels, HEADS, strict=True):
        (image,) = axes.images
        np.testing.assert_array_equal(np.asarray(image.get_array()), weights)
        assert image.get_clim() == (0, 1) and image.origin == 'upper'
    assert figure.get_suptitle() == 'decoder, layer 2'


def test_labels_are_at_the_outer_panels_only():
    figure = head_grid.plot_head_grid(HEADS, ROWS, COLUMNS, '')
    panels = figure.axes[:6]  # four in the first row, two in the second
    assert [labels(axes.yaxis) for axes in panels] == [ROWS, [], [], [], ROWS, []]
    assert [labels(axes.xaxis) for axes in panels] == [[], [], COLUMNS, COLUMNS, COLUMNS, COLUMNS]
    first, second = panels[0].get_position(), panels[4].get_position()
    assert first.y0 > second.y1 and first.x0 == pytest.approx(second.x0)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(('N', 'T', 'S'), [(8, 1024, 1024), (49, 64, 64), (1, 2, 3000), (4, 60, 60)])
def test_figure_size_is_bounded_and_unreadable_labels_are_left_out(N, T, S):
    figure = head_grid.plot_head_grid(np.zeros((N, T, S), np.float32), ['mot'] * T, ['word'] * S, 'layer 1')
    assert max(figure.get_size_inches()) <= heatmap.MAX_INCHES + 1e-6
    are_left_out = (N, T) != (4, 60)
    assert (labels(figure.axes[0].yaxis) == []) == are_left_out
    note = f' ({S:,} tokens across, {T:,} down: no room for labels)'
    assert figure.get_suptitle() == 'layer 1' + note * are_left_out


def test_only_the_cell_with_the_weight_is_dark():
    figure = head_grid.plot_head_grid(HEADS[1:2], ROWS, COLUMNS, '', first=2)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels, axes = np.asarray(canvas.buffer_rgba())[..., 0], figure.axes[0]
    assert axes.get_title(loc='left') == 'head 2'
    for row in range(3):
        for column in range(4):
            x, y = axes.transData.transform((column, row)).astype(int)
            dark = pixels[pixels.shape[0] - 1 - y, x] < 128
            assert dark == ((row, column) == (1, 1))


def test_figure_paths_of_different_texts_differ():
    texts = ['The cat.', 'the cat', 'The cat!', 'THE CAT', 'été', 'ete', '', '...', 'x' * 60, 'x' * 61]
    path_name = lambda text: head_grid.figure_path(Path(), 'attend', text).name.removeprefix('attend-')
    names = [path_name(text) for text in texts]
    assert len(set(names)) == len(texts) and names == [path_name(text) for text in texts]
    assert names[0].startswith('the-cat-')
    assert all(len(name) <= 47 and set(name) <= set('abcdefghijklmnopqrstuvwxyz0123456789-') for name in names)


MAPS = {'encoder/attention': np.stack([HEADS[:2, :, :3]] * 3), 'decoder/cross_attention': np.stack([HEADS[:4]] * 3)}
LABELS = {'encoder/attention': (ROWS, ROWS), 'decoder/cross_attention': (ROWS, COLUMNS)}


def test_draw_writes_one_picture_for_each_layer_and_one_array_file(tmp_path, capsys):
    head_grid.draw_head_grids(tmp_path / 'a' / 'b', MAPS, LABELS)
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    kinds = ('encoder-attention', 'decoder-cross_attention')
    names = ['weights.npz', *(f'{kind}-layer{layer}.png' for kind in kinds for layer in (1, 2, 3))]
    assert [path.name for path in written] == names
    assert sorted(path.name for path in (tmp_path / 'a' / 'b').iterdir()) == sorted(names)
    assert all(matplotlib.image.imread(path).ndim == 3 for path in written[1:])
    with np.load(written[0], allow_pickle=False) as arrays:
        assert len(arrays.files) == 6
        for kind, weights in MAPS.items():
            name = kind.replace('/', '.')
            np.testing.assert_array_equal(arrays[name], weights)
            assert (arrays[f'rows {name}'].tolist(), arrays[f'columns {name}'].tolist()) == LABELS[kind]


def test_chosen_layer_and_head_are_drawn_and_all_weights_are_saved(tmp_path, capsys, monkeypatch):
    calls, plot_head_grid = [], head_grid.plot_head_grid
    monkeypatch.setattr(head_grid, 'plot_head_grid', lambda *args: calls.append(args) or plot_head_grid(*args))
    head_grid.draw_head_grids(tmp_path, MAPS, LABELS, layer=3, head=2)
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    names = ['weights.npz', 'encoder-attention-layer3-head2.png', 'decoder-cross_attention-layer3-head2.png']
    assert [path.name for path in written] == names
    for (heads, *_, title, first), weights in zip(calls, MAPS.values(), strict=True):
        np.testing.assert_array_equal(heads, weights[2, 1:2])
        assert title.endswith('attention, layer 3') and first == 2
    with np.load(written[0], allow_pickle=False) as arrays:
        assert arrays['encoder.attention'].shape == (3, 2, 3, 3)


@pytest.mark.parametrize(('chosen', 'message'), [
    ({'layer': 0}, '--layer is 0; expected 1 to 3, the layers of encoder/attention'),
    ({'layer': 4}, '--layer is 4; expected 1 to 3, the layers of encoder/attention'),
    ({'head': 3}, '--head is 3; expected 1 to 2, the heads of encoder/attention'),
])  # fmt: skip
def test_unknown_layer_or_head_is_refused_before_anything_is_written(tmp_path, chosen, message):
    with pytest.raises(UserError, match=message):
        head_grid.draw_head_grids(tmp_path / 'new', MAPS, LABELS, **chosen)
    with pytest.raises(UserError, match='this model has no attention to draw'):
        head_grid.draw_head_grids(tmp_path / 'new', {}, {})
    assert not (tmp_path / 'new').exists()
