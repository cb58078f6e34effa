"""Runs to report on, and what their pages hold."""

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


def captioned(folder, caption):
    """Gives a run a picture of its evaluation."""
    picture = heatmap.render_png(figures.plot_training_curves({}))
    (folder / 'figures/eval-test').mkdir(parents=True)
    (folder / 'figures/eval-test/a.png').write_bytes(picture)
    (folder / 'figures/eval-test/pictures.json').write_text(json.dumps([{'file': 'a.png', 'caption': caption}]))


def pictures(markup):
    return [base64.b64decode(data) for data in re.findall(r'base64,([^"]+)"', markup)]
