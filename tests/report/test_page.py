"""The page of a run: markup, and what it takes from the run's directory."""

import base64
import json
import re
from importlib import resources

import pytest
from markupsafe import escape

from attnlab.errors import UserError
from attnlab.report import figures, html, page
from attnlab.tasks import heatmap
from tests.report.pages import COLUMNS, ROWS, SAMPLE, SCORES, WEIGHTS, captioned, outline, pictures, run

NASTY = '<script>"\'&amp;</td>'


def test_every_text_is_escaped(tmp_path):
    sample = {**SAMPLE, 'source': NASTY, 'reference': NASTY, 'output': NASTY}
    scores = {**SCORES, 'bleu_signature': NASTY, NASTY: 1.0}
    folder = run(tmp_path / 'a<script>', scores, [sample])
    (folder / 'config.json').write_text(json.dumps({'data': {'name': NASTY}, NASTY: NASTY}))
    captioned(folder, NASTY)
    for path in (page.write_run_page(folder), page.write_comparison_page(tmp_path / 'b.html', [folder])):
        markup = path.read_text('utf-8')
        assert '<script' not in markup
        texts = outline(markup).texts
        assert texts[0] == 'a<script>, test'
        assert texts.count(NASTY) >= 4  # three of the card, one of the scores
        for text in (f'BLEU: {NASTY}', f'{NASTY} · seed None'):
            assert any(found.endswith(text) for found in texts), text
        assert any(f'{NASTY} = {json.dumps(NASTY)}' in found for found in texts)
    assert f'alt="{escape(NASTY)}"' in markup


def test_a_picture_is_shown_at_half_its_size():
    data = heatmap.render_png(figures.plot_training_curves({}))
    found = html.encode_picture(data, 'a "curve"')
    assert base64.b64decode(found.base64) == data
    assert (found.width, found.height) == tuple(int.from_bytes(data[at : at + 4], 'big') // 2 for at in (16, 20))


def test_a_page_is_whole_and_asks_nothing_of_the_network(tmp_path):
    markup = page.write_run_page(run(tmp_path / 'Œuvre <1>')).read_text('utf-8')
    assert markup.startswith('<!doctype html>')
    assert '<meta charset="utf-8">' in markup
    assert 'viewport' in markup
    assert outline(markup).texts[:2] == ['Œuvre <1>, test'] * 2
    assert 'prefers-color-scheme: dark' in markup
    assert '@media print' in markup
    assert '<script' not in markup
    assert '://' not in markup
    assert 'url(' not in markup


def test_a_score_of_an_unknown_name_has_a_row(tmp_path):
    scores = {'split': 'test', 'own_score': 0.25, 'images': 1200, 'unknown': None, 'loss': 1.5}
    texts = outline(page.write_run_page(run(tmp_path / 'a', scores, [])).read_text('utf-8')).texts
    at = texts.index('Scores')
    assert texts[at + 1 : at + 8] == ['value', 'Loss', '1.500', 'Own score', '0.250', 'Images', '1,200']


@pytest.mark.parametrize('scheme', ['light', 'dark', 'print'])
def test_every_text_stands_out_from_every_background(scheme):
    style = resources.files('attnlab.report').joinpath('templates/style.css').read_text('utf-8')
    light, dark, printed = (dict(re.findall(r'(--\w+): (#\w+);', root))
                            for root in re.findall(r':root \{(.*?)\}', style, re.DOTALL))  # fmt: skip
    colours = light | {'light': {}, 'dark': dark, 'print': printed}[scheme]

    def luminance(colour):
        digits = colour[1:] if len(colour) == 7 else ''.join(2 * digit for digit in colour[1:])
        parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for ink in ('--ink', '--quiet', '--accent'):
        for paper in ('--page', '--card'):
            dark, bright = sorted(luminance(colours[name]) for name in (ink, paper))
            assert (bright + 0.05) / (dark + 0.05) >= 4.5, (ink, paper)
    rules = re.findall(r'([^{}]+)\{([^{}]*)\}', style)
    fixed = {selector.strip() for selector, body in rules if re.search(r'(?<!-)(background|color): #', body)}
    assert fixed == {'img'}  # pictures have no text of the page


def test_a_run_becomes_a_page(tmp_path):
    path = page.write_run_page(run(tmp_path / 'my-run'))
    assert path == tmp_path / 'my-run' / 'report.html'
    markup = path.read_text('utf-8')
    parser = outline(markup)
    for text in ('my-run, test', '45.3', '63.1', '0.071', '1,234,567', 'BLEU: tok:13a', 'la robe <rouge>',
                 'la robe rouge', 'gru · attention: additive · seed 3'):
        assert text in parser.texts, text
    assert 'Perplexity' not in parser.texts
    assert 'Exact match' not in parser.texts
    assert 'model.attention = "additive"' in markup.replace('&#34;', '"')
    assert len(pictures(markup)) == 3  # by length, curves, one alignment
    assert all(link.startswith('data:image/png') for link in parser.links)


def test_the_heat_map_is_that_of_the_sample(tmp_path):
    from attnlab.data.alignments import GoldLinks

    gold = GoldLinks(frozenset([(1, 2), (2, 1)]), frozenset([(1, 2), (2, 1), (0, 0)]))
    expected = heatmap.render_png(heatmap.plot_heatmap(WEIGHTS, ROWS, COLUMNS, gold=gold))
    nested = page.write_run_page(run(tmp_path / 'nested')).read_text('utf-8')
    samples = [{**SAMPLE, 'weights': 1}]
    folder = run(tmp_path / 'npz', samples=samples, arrays=[WEIGHTS[::-1], WEIGHTS])
    indexed = page.write_run_page(folder).read_text('utf-8')
    assert pictures(nested)[-1] == pictures(indexed)[-1] == expected


def test_a_run_without_samples_or_metrics_has_no_such_section(tmp_path):
    folder = run(tmp_path / 'a')
    (folder / 'samples/test.json').unlink()
    (folder / 'metrics.jsonl').unlink()
    texts = outline(page.write_run_page(folder).read_text('utf-8')).texts
    assert 'Scores' in texts
    assert 'Alignments' not in texts
    assert 'Training' not in texts


def test_what_is_missing_or_broken_is_named(tmp_path):
    folder = run(tmp_path / 'a')
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


def test_lines_of_metrics_that_are_no_records_are_left_out(tmp_path, caplog):
    folder = run(tmp_path / 'a')
    path = folder / 'metrics.jsonl'
    path.write_bytes(b'\xff\xfe\n5\n' + path.read_bytes())
    page.write_run_page(folder)
    assert caplog.messages == [f'{path}: left out 2 lines that are not valid records, first line 1']


def test_a_page_stays_small_and_says_what_it_left_out(tmp_path, monkeypatch):
    samples = [{**SAMPLE, 'source': f'the red dress {index}'} for index in range(5)]
    folder = run(tmp_path / 'a', samples=samples)
    one = len(pictures(page.write_run_page(folder).read_text('utf-8'))[-1])
    monkeypatch.setattr(page, 'MAX_PICTURE_BYTES', 2 * one)
    markup = page.write_run_page(folder).read_text('utf-8')
    assert len(pictures(markup)) == 2 + 2
    assert '3 more samples in the run.' in markup


def test_runs_stand_beside_each_other(tmp_path):
    fixed = {'bleu': 24.0, 'parameters': 7, 'by_length': [{'from': 1, 'to': 10, 'sentences': 5, 'bleu': 20.0}]}
    other = {**SAMPLE, 'output': 'la robe', 'rows': ['la', 'robe', '</s>'], 'weights': None, 'gold': None}
    runs = [run(tmp_path / 'attention'), run(tmp_path / 'fixed', fixed, [other])]
    markup = page.write_comparison_page(tmp_path / 'both.html', runs).read_text('utf-8')
    texts = outline(markup).texts
    assert texts[0] == 'attention and fixed, test'
    row = texts.index('BLEU')
    assert texts[row:row + 3] == ['BLEU', '45.3', '24.0']
    row = texts.index('AER, weights at the emitting step')
    assert texts[row + 1:row + 3] == ['0.071', '–']
    card = texts.index('the red dress')
    assert texts[card:card + 5] == ['the red dress', 'attention', 'la robe <rouge>', 'fixed', 'la robe']
    assert len(pictures(markup)) == 3  # one by length, one of curves, and the attention run's heat map


def test_runs_of_one_name_are_refused(tmp_path):
    with pytest.raises(UserError, match='different names'):
        page.write_comparison_page(tmp_path / 'a.html', [run(tmp_path / 'x' / 'a'), run(tmp_path / 'y' / 'a')])
