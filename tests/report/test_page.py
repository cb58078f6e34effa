"""The page of a run: markup, and what it takes from the run's directory."""

import base64
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from attnlab.errors import UserError
from attnlab.report import figures, page
from attnlab.tasks import heatmap

ROWS, COLUMNS = ['la', 'robe', 'rouge', '</s>'], ['the', 'red', 'dress', '</s>']
WEIGHTS = np.eye(4)[[0, 2, 1, 3]]
SAMPLE = {'source': 'the red dress', 'reference': 'la robe rouge', 'output': 'la robe <rouge>', 'rows': ROWS,
          'columns': COLUMNS, 'weights': WEIGHTS.tolist(), 'gold': {'sure': [[1, 2], [2, 1]], 'possible': [[0, 0]]}}
SCORES = {'bleu': 45.26, 'bleu_signature': 'tok:13a', 'chrf': 63.1, 'aer_emit': 0.0712, 'parameters': 1234567,
          'perplexity': None, 'by_length': [{'from': 1, 'to': 10, 'sentences': 5, 'bleu': 44.0}]}


class Outline(HTMLParser):
    """Fails on a tag that is not closed in order; keeps texts and attributes."""

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ('src', 'href')]
        if tag not in ('meta', 'img'):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip() and self.open[-1] != 'style':
            self.texts.append(data)


def outline(markup):
    parser = Outline()
    parser.feed(markup)
    assert not parser.open
    return parser


def run(folder, scores=SCORES, samples=(SAMPLE,), arrays=()):
    (folder / 'samples').mkdir(parents=True)
    (folder / 'config.json').write_text(json.dumps({'seed': 3, 'model': {'cell': 'gru', 'attention': 'additive'}}))
    (folder / 'scores-test.json').write_text(json.dumps(scores))
    (folder / 'metrics.jsonl').write_text('{"step": 1, "split": "train", "loss": 2.0}\n{"step": 2, "spl')  # killed
    (folder / 'samples/test.json').write_text(json.dumps(list(samples)))
    if arrays:
        np.savez_compressed(folder / 'samples/test.npz', *arrays)
    return folder


def pictures(markup):
    return [base64.b64decode(data) for data in re.findall(r'base64,([^"]+)"', markup)]


@pytest.mark.parametrize('make', [
    page.paragraph, page.preformatted, page.section, lambda t: page.section('a', page.paragraph(t)),
    lambda t: page.table([t], [[t, t]]), lambda t: page.tiles([(t, t)]), lambda t: page.folded(t, page.paragraph(t)),
    lambda t: page.image(heatmap.png(figures.curves({})), t, t)])
def test_text_is_escaped(make):
    nasty = '<script>"\'&amp;</td>'
    markup = make(nasty)
    assert '<script' not in markup
    parser = outline(markup)
    assert nasty in parser.texts or make is page.section or nasty in parser.texts[0]


def test_a_table_keeps_its_cells_in_order():
    markup = page.table(['', 'a'], [['BLEU', '1'], ['chrF', '2']])
    assert outline(markup).texts == ['a', 'BLEU', '1', 'chrF', '2']


def test_an_image_holds_the_png_at_half_its_size():
    data = heatmap.png(figures.curves({}))
    markup = page.image(data, 'a "curve"')
    assert pictures(markup) == [data]
    width, height = int.from_bytes(data[16:20], 'big'), int.from_bytes(data[20:24], 'big')
    assert f'width="{width // 2}" height="{height // 2}"' in markup
    assert 'alt="a &quot;curve&quot;"' in markup


def test_a_page_is_whole_and_asks_nothing_of_the_network(tmp_path):
    page.write(tmp_path / 'a.html', 'Œuvre <1>', [page.section('é', page.paragraph('ç'))])
    markup = (tmp_path / 'a.html').read_text('utf-8')
    assert markup.startswith('<!doctype html>')
    assert '<meta charset="utf-8">' in markup
    assert 'viewport' in markup
    assert outline(markup).texts == ['Œuvre <1>', 'Œuvre <1>', 'é', 'ç']
    assert 'prefers-color-scheme: dark' in markup
    assert '@media print' in markup
    assert '<script' not in markup
    assert '://' not in markup
    assert 'url(' not in markup


@pytest.mark.parametrize('scheme', ['light', 'dark', 'print'])
def test_every_text_stands_out_from_every_background(scheme):
    light, dark, printed = (dict(re.findall(r'(--\w+): (#\w+);', root))
                            for root in re.findall(r':root \{(.*?)\}', page.STYLE, re.DOTALL))  # fmt: skip
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
    rules = re.findall(r'([^{}]+)\{([^{}]*)\}', page.STYLE)
    fixed = {selector.strip() for selector, body in rules if re.search(r'(?<!-)(background|color): #', body)}
    assert fixed == {'img'}  # pictures have no text of the page


def test_a_run_becomes_a_page(tmp_path):
    path = page.run_page(run(tmp_path / 'my-run'))
    assert path == tmp_path / 'my-run' / 'report.html'
    markup = path.read_text('utf-8')
    parser = outline(markup)
    for text in ('my-run, test', '45.3', '63.1', '0.071', '1,234,567', 'BLEU: tok:13a', 'la robe <rouge>',
                 'la robe rouge', 'gru · additive attention · seed 3'):
        assert text in parser.texts, text
    assert 'Perplexity' not in parser.texts
    assert 'Exact match' not in parser.texts
    assert 'model.attention = "additive"' in markup.replace('&quot;', '"')
    assert len(pictures(markup)) == 3  # by length, curves, one alignment
    assert all(link.startswith('data:image/png') for link in parser.links)


def test_the_heat_map_is_that_of_the_sample(tmp_path):
    from attnlab.data.alignments import Links

    gold = Links(frozenset([(1, 2), (2, 1)]), frozenset([(1, 2), (2, 1), (0, 0)]))
    expected = heatmap.png(heatmap.figure(WEIGHTS, ROWS, COLUMNS, gold=gold))
    nested = page.run_page(run(tmp_path / 'nested')).read_text('utf-8')
    samples = [{**SAMPLE, 'weights': 1}]
    folder = run(tmp_path / 'npz', samples=samples, arrays=[WEIGHTS[::-1], WEIGHTS])
    indexed = page.run_page(folder).read_text('utf-8')
    assert pictures(nested)[-1] == pictures(indexed)[-1] == expected


def test_a_run_without_samples_or_metrics_has_no_such_section(tmp_path):
    folder = run(tmp_path / 'a')
    (folder / 'samples/test.json').unlink()
    (folder / 'metrics.jsonl').unlink()
    texts = outline(page.run_page(folder).read_text('utf-8')).texts
    assert 'Scores' in texts
    assert 'Alignments' not in texts
    assert 'Training' not in texts


def test_what_is_missing_or_broken_is_named(tmp_path):
    folder = run(tmp_path / 'a')
    with pytest.raises(UserError, match=r'scores-valid.json is missing.*attnlab eval'):
        page.run_page(folder, 'valid')
    (folder / 'scores-test.json').write_text('{')
    with pytest.raises(UserError, match=r'scores-test\.json is not JSON'):
        page.run_page(folder)
    with pytest.raises(UserError, match=r'config.json is missing.*attnlab train'):
        page.run_page(tmp_path / 'nowhere')
    (folder / 'scores-test.json').write_bytes(b'\xff')
    with pytest.raises(UserError, match=r'scores-test\.json is not JSON'):
        page.run_page(folder)


def test_lines_of_metrics_that_are_no_records_are_left_out(tmp_path, caplog):
    folder = run(tmp_path / 'a')
    path = folder / 'metrics.jsonl'
    path.write_bytes(b'\xff\xfe\n5\n' + path.read_bytes())
    page.run_page(folder)
    assert caplog.messages == [f'{path}: left out 2 lines that are no records, the first is line 1']


def test_a_page_stays_small_and_says_what_it_left_out(tmp_path, monkeypatch):
    samples = [{**SAMPLE, 'source': f'the red dress {index}'} for index in range(5)]
    folder = run(tmp_path / 'a', samples=samples)
    one = len(pictures(page.run_page(folder).read_text('utf-8'))[-1])
    monkeypatch.setattr(page, 'PICTURE_BYTES', 2 * one)
    markup = page.run_page(folder).read_text('utf-8')
    assert len(pictures(markup)) == 2 + 2
    assert '3 more samples in the run.' in markup


def test_runs_stand_beside_each_other(tmp_path):
    fixed = {'bleu': 24.0, 'parameters': 7, 'by_length': [{'from': 1, 'to': 10, 'sentences': 5, 'bleu': 20.0}]}
    other = {**SAMPLE, 'output': 'la robe', 'rows': ['la', 'robe', '</s>'], 'weights': None, 'gold': None}
    runs = [run(tmp_path / 'attention'), run(tmp_path / 'fixed', fixed, [other])]
    markup = page.compare(tmp_path / 'both.html', runs).read_text('utf-8')
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
        page.compare(tmp_path / 'a.html', [run(tmp_path / 'x' / 'a'), run(tmp_path / 'y' / 'a')])
