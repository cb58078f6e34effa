"""The page of a run: its markup, and the files that it reads from the run's directory."""

import base64
import json
import re
from importlib import resources

import pytest
from markupsafe import escape

from attnlab.errors import UserError
from attnlab.report import figures, html, page
from attnlab.tasks import heatmap
from tests.report.pages import (
    COLUMNS,
    ROWS,
    SAMPLE,
    SCORES,
    WEIGHTS,
    add_picture,
    decode_pictures,
    parse_page,
    write_run,
)

HOSTILE_TEXT = '<script>"\'&amp;</td>'


def test_all_text_is_escaped(tmp_path):
    sample = {**SAMPLE, 'source': HOSTILE_TEXT, 'reference': HOSTILE_TEXT, 'output': HOSTILE_TEXT}
    scores = {**SCORES, 'bleu_signature': HOSTILE_TEXT, HOSTILE_TEXT: 1.0}
    folder = write_run(tmp_path / 'a<script>', scores, [sample])
    (folder / 'config.json').write_text(json.dumps({'data': {'name': HOSTILE_TEXT}, HOSTILE_TEXT: HOSTILE_TEXT}))
    add_picture(folder, HOSTILE_TEXT)
    for path in (page.write_run_page(folder), page.write_comparison_page(tmp_path / 'b.html', [folder])):
        markup = path.read_text('utf-8')
        assert '<script' not in markup
        texts = parse_page(markup).texts
        assert texts[0] == 'a<script>, test'
        assert texts.count(HOSTILE_TEXT) >= 4  # three in the card, one in the scores
        for text in (f'BLEU: {HOSTILE_TEXT}', f'{HOSTILE_TEXT} · seed None'):
            assert any(page_text.endswith(text) for page_text in texts), text
        assert any(f'{HOSTILE_TEXT} = {json.dumps(HOSTILE_TEXT)}' in page_text for page_text in texts)
    assert f'alt="{escape(HOSTILE_TEXT)}"' in markup


def test_picture_has_half_the_size_of_its_pixels():
    data = heatmap.render_png(figures.plot_training_curves({}))
    picture = html.encode_picture(data, 'a "curve"')
    assert base64.b64decode(picture.base64) == data
    size = tuple(int.from_bytes(data[start : start + 4], 'big') // 2 for start in (16, 20))
    assert (picture.width, picture.height) == size


def test_page_is_complete_and_loads_nothing_from_the_network(tmp_path):
    markup = page.write_run_page(write_run(tmp_path / 'Œuvre <1>')).read_text('utf-8')
    assert markup.startswith('<!doctype html>')
    assert '<meta charset="utf-8">' in markup
    assert 'viewport' in markup
    assert parse_page(markup).texts[:2] == ['Œuvre <1>, test'] * 2
    assert 'prefers-color-scheme: dark' in markup
    assert '@media print' in markup
    assert '<script' not in markup
    assert '://' not in markup
    assert 'url(' not in markup


def test_score_with_an_unknown_name_has_a_row(tmp_path):
    scores = {'split': 'test', 'own_score': 0.25, 'images': 1200, 'unknown': None, 'loss': 1.5}
    texts = parse_page(page.write_run_page(write_run(tmp_path / 'a', scores, [])).read_text('utf-8')).texts
    at = texts.index('Scores')
    assert texts[at + 1 : at + 8] == ['value', 'Loss', '1.500', 'Own score', '0.250', 'Images', '1,200']


@pytest.mark.parametrize('scheme', ['light', 'dark', 'print'])
def test_text_has_enough_contrast_on_every_background(scheme):
    style = resources.files('attnlab.report').joinpath('templates/style.css').read_text('utf-8')
    light, dark, printed = (dict(re.findall(r'(--\w+): (#\w+);', root))
                            for root in re.findall(r':root \{(.*?)\}', style, re.DOTALL))  # fmt: skip
    colours = light | {'light': {}, 'dark': dark, 'print': printed}[scheme]

    def luminance(colour):  # WCAG 2
        digits = colour[1:] if len(colour) == 7 else ''.join(2 * digit for digit in colour[1:])
        parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for text in ('--ink', '--quiet', '--accent'):
        for background in ('--page', '--card'):
            dark, bright = sorted(luminance(colours[name]) for name in (text, background))
            assert (bright + 0.05) / (dark + 0.05) >= 4.5, (text, background)
    rules = re.findall(r'([^{}]+)\{([^{}]*)\}', style)
    fixed = {selector.strip() for selector, body in rules if re.search(r'(?<!-)(background|color): #', body)}
    assert fixed == {'img'}  # no text of the page is in pictures


def test_page_has_the_scores_texts_and_pictures_of_a_run(tmp_path):
    path = page.write_run_page(write_run(tmp_path / 'my-run'))
    assert path == tmp_path / 'my-run' / 'report.html'
    markup = path.read_text('utf-8')
    parser = parse_page(markup)
    for text in ('my-run, test', '45.3', '63.1', '0.071', '1,234,567', 'BLEU: tok:13a', 'la robe <rouge>',
                 'la robe rouge', 'gru · attention: additive · seed 3'):
        assert text in parser.texts, text
    assert 'Perplexity' not in parser.texts
    assert 'Exact match' not in parser.texts
    assert 'model.attention = "additive"' in markup.replace('&#34;', '"')
    assert len(decode_pictures(markup)) == 3  # BLEU by length, curves, one alignment
    assert all(link.startswith('data:image/png') for link in parser.links)


def test_heatmap_is_that_of_the_sample_from_json_or_npz(tmp_path):
    from attnlab.data.alignments import GoldLinks

    gold = GoldLinks(frozenset([(1, 2), (2, 1)]), frozenset([(1, 2), (2, 1), (0, 0)]))
    expected = heatmap.render_png(heatmap.plot_heatmap(WEIGHTS, ROWS, COLUMNS, gold=gold))
    from_json = page.write_run_page(write_run(tmp_path / 'nested')).read_text('utf-8')
    samples = [{**SAMPLE, 'weights': 1}]
    folder = write_run(tmp_path / 'npz', samples=samples, arrays=[WEIGHTS[::-1], WEIGHTS])
    from_npz = page.write_run_page(folder).read_text('utf-8')
    assert decode_pictures(from_json)[-1] == decode_pictures(from_npz)[-1] == expected


def test_run_without_samples_or_metrics_has_no_such_section(tmp_path):
    folder = write_run(tmp_path / 'a')
    (folder / 'samples/test.json').unlink()
    (folder / 'metrics.jsonl').unlink()
    texts = parse_page(page.write_run_page(folder).read_text('utf-8')).texts
    assert 'Scores' in texts
    assert 'Alignments' not in texts
    assert 'Training' not in texts


def test_missing_or_damaged_files_are_named(tmp_path):
    folder = write_run(tmp_path / 'a')
    with pytest.raises(UserError, match=r'scores-valid.json is missing.*attnlab eval'):
        page.write_run_page(folder, 'valid')
    (folder / 'scores-test.json').write_text('{')
    with pytest.raises(UserError, match=r'scores-test\.json is not JSON'):
        page.write_run_page(folder)
    with pytest.raises(UserError, match=r'config.json is missing.*attnlab train'):
        page.write_run_page(tmp_path / 'nowhere')
    (folder / 'scores-test.json').write_bytes(b'\xff')
    with pytest.raises(UserError, match=r'scores-test\.json is not JSON'):
        page.write_run_page(folder)


def test_damaged_lines_of_metrics_are_left_out(tmp_path, caplog):
    folder = write_run(tmp_path / 'a')
    path = folder / 'metrics.jsonl'
    path.write_bytes(b'\xff\xfe\n5\n' + path.read_bytes())
    page.write_run_page(folder)
    assert caplog.messages == [f'{path}: left out 2 lines that are not valid records, first line 1']


@pytest.mark.slow
def test_page_size_is_limited_and_the_number_of_samples_left_out_is_given(tmp_path, monkeypatch):
    samples = [{**SAMPLE, 'source': f'the red dress {index}'} for index in range(5)]
    folder = write_run(tmp_path / 'a', samples=samples)
    picture_bytes = len(decode_pictures(page.write_run_page(folder).read_text('utf-8'))[-1])
    monkeypatch.setattr(page, 'MAX_PICTURE_BYTES', 2 * picture_bytes)
    markup = page.write_run_page(folder).read_text('utf-8')
    assert len(decode_pictures(markup)) == 2 + 2
    assert 'The run has 3 more samples.' in markup


def test_comparison_page_has_runs_side_by_side(tmp_path):
    fixed = {'bleu': 24.0, 'parameters': 7, 'by_length': [{'from': 1, 'to': 10, 'sentences': 5, 'bleu': 20.0}]}
    other = {**SAMPLE, 'output': 'la robe', 'rows': ['la', 'robe', '</s>'], 'weights': None, 'gold': None}
    runs = [write_run(tmp_path / 'attention'), write_run(tmp_path / 'fixed', fixed, [other])]
    markup = page.write_comparison_page(tmp_path / 'both.html', runs).read_text('utf-8')
    texts = parse_page(markup).texts
    assert texts[0] == 'attention and fixed, test'
    row = texts.index('BLEU')
    assert texts[row:row + 3] == ['BLEU', '45.3', '24.0']
    row = texts.index('AER, weights at the emitting step')
    assert texts[row + 1:row + 3] == ['0.071', '–']
    card = texts.index('the red dress')
    assert texts[card:card + 5] == ['the red dress', 'attention', 'la robe <rouge>', 'fixed', 'la robe']
    assert len(decode_pictures(markup)) == 3  # one by length, one of curves, and the attention run's heat map


def test_comparison_of_runs_with_the_same_name_is_refused(tmp_path):
    runs = [write_run(tmp_path / 'x' / 'a'), write_run(tmp_path / 'y' / 'a')]
    with pytest.raises(UserError, match='different names'):
        page.write_comparison_page(tmp_path / 'a.html', runs)
