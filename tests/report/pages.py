"""Directories of runs, and parsers of their pages, for tests of reports."""

import base64
import json
import re
from html.parser import HTMLParser

import numpy as np

from attnlab.report import figures
from attnlab.tasks import heatmap

ROWS, COLUMNS = ['la', 'robe', 'rouge', '</s>'], ['the', 'red', 'dress', '</s>']
WEIGHTS = np.eye(4)[[0, 2, 1, 3]]
SAMPLE = {'source': 'the red dress', 'reference': 'la robe rouge', 'output': 'la robe <rouge>', 'rows': ROWS,
          'columns': COLUMNS, 'weights': WEIGHTS.tolist(), 'gold': {'sure': [[1, 2], [2, 1]], 'possible': [[0, 0]]}}
SCORES = {'bleu': 45.26, 'bleu_signature': 'tok:13a', 'chrf': 63.1, 'aer_emit': 0.0712, 'parameters': 1234567,
          'perplexity': None, 'by_length': [{'from': 1, 'to': 10, 'sentences': 5, 'bleu': 44.0}]}


class PageParser(HTMLParser):
    """Collects the texts and the links of a page; fails if tags are not closed in order."""

    def __init__(self):
        super().__init__()
        self.open_tags, self.texts, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ('src', 'href')]
        if tag not in ('meta', 'img'):
            self.open_tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open_tags.pop() == tag

    def handle_data(self, data):
        if data.strip() and self.open_tags[-1] != 'style':
            self.texts.append(data)


def parse_page(markup):
    """Return the `PageParser` that has read a page; asserts that all tags are closed."""
    parser = PageParser()
    parser.feed(markup)
    assert not parser.open_tags
    return parser


def write_run(folder, scores=SCORES, samples=(SAMPLE,), arrays=()):
    """Write the files of a run that its page reads; return the folder. arrays: matrices of samples/test.npz."""
    (folder / 'samples').mkdir(parents=True)
    (folder / 'config.json').write_text(json.dumps({'seed': 3, 'model': {'cell': 'gru', 'attention': 'additive'}}))
    (folder / 'scores-test.json').write_text(json.dumps(scores))
    (folder / 'metrics.jsonl').write_text('{"step": 1, "split": "train", "loss": 2.0}\n{"step": 2, "spl')  # killed
    (folder / 'samples/test.json').write_text(json.dumps(list(samples)))
    if arrays:
        np.savez_compressed(folder / 'samples/test.npz', *arrays)
    return folder


def add_picture(folder, caption):
    """Add a picture of the evaluation, with a caption, to the directory of a run."""
    picture = heatmap.render_png(figures.plot_training_curves({}))
    (folder / 'figures/eval-test').mkdir(parents=True)
    (folder / 'figures/eval-test/a.png').write_bytes(picture)
    (folder / 'figures/eval-test/pictures.json').write_text(json.dumps([{'file': 'a.png', 'caption': caption}]))


def decode_pictures(markup):
    """Return the PNG of each picture of a page."""
    return [base64.b64decode(data) for data in re.findall(r'base64,([^"]+)"', markup)]
