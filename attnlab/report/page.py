"""One self-contained HTML page: tiny pure functions that return markup, and the pages of runs.

Every function that takes text escapes it; what it returns is markup and is passed on as a block.  No script, no
request to anywhere: style inline, pictures as data URIs.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnlab import files
from attnlab.errors import UserError
from attnlab.report import figures
from attnlab.tasks import heatmap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE_BYTES = 1_400_000  # of PNGs in one page: a third more as base64, which keeps a page under 2 MB

SCORES = (  # key of scores-SPLIT.json, what the reader sees, format
    ('bleu', 'BLEU', '{:.1f}'),
    ('bleu_words', 'BLEU of lower-cased words', '{:.1f}'),
    ('chrf', 'chrF', '{:.1f}'),
    ('exact_match', 'Exact match', '{:.1%}'),
    ('aer_emit', 'AER, weights at the emitting step', '{:.3f}'),
    ('aer_shifted', 'AER, weights shifted by one step', '{:.3f}'),
    ('inversion_emit', 'Inverted adjectives found, emitting step', '{:.1%}'),
    ('inversion_shifted', 'Inverted adjectives found, shifted by one', '{:.1%}'),
    ('accuracy', 'Accuracy', '{:.1%}'),
    ('top5', 'Among the five likeliest', '{:.1%}'),
    ('calibration_error', 'Calibration error', '{:.3f}'),
    ('loss', 'Loss', '{:.3f}'),
    ('perplexity', 'Perplexity', '{:.2f}'),
    ('bits_per_character', 'Bits per character', '{:.3f}'),
    ('sentences', 'Sentences', '{:,}'),
    ('tokens', 'Tokens', '{:,}'),
    ('images', 'Images', '{:,}'),
    ('parameters', 'Parameters', '{:,}'),
)

TILES = ('bleu', 'chrf', 'exact_match', 'aer_emit', 'bits_per_character', 'accuracy', 'top5', 'calibration_error')

STYLE = """
:root { color-scheme: light dark; --page: #fbfbfa; --card: #ffffff; --ink: #1f2430; --quiet: #667080; --line: #e4e6ea;
  --accent: #1f5a92; }
@media (prefers-color-scheme: dark) { :root { --page: #15171c; --card: #1d2027; --ink: #e6e8ec; --quiet: #9aa3b2;
  --line: #30343d; --accent: #8ab6e0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 2.5rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif; -webkit-text-size-adjust: 100%; }
h1 { font-size: 1.75rem; line-height: 1.2; letter-spacing: -.01em; margin: 0 0 .4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.75rem 0 .75rem; padding-bottom: .4rem; border-bottom: 1px solid var(--line); }
p { margin: .5rem 0; max-width: 46rem; overflow-wrap: anywhere; }
.quiet { color: var(--quiet); font-size: .875rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .925rem; }
th, td { padding: .4rem 1.5rem .4rem 0; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--quiet); font-weight: 500; }
td + td, th + th { text-align: right; padding-right: .75rem; padding-left: .75rem; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .9rem 1rem; overflow-x: auto;
  font: .8rem/1.5 ui-monospace, 'SF Mono', Menlo, 'DejaVu Sans Mono', monospace; }
summary { cursor: pointer; color: var(--quiet); font-size: .875rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .75rem; margin: 1.5rem 0 0; }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: .8rem 1rem .9rem; }
.tile b { display: block; font-size: 1.7rem; font-weight: 600; line-height: 1.25; letter-spacing: -.01em;
  font-variant-numeric: tabular-nums; color: var(--accent); }
.tile span { color: var(--quiet); font-size: .8rem; }
.card { padding: 1.1rem 1.25rem 1.25rem; margin: 1rem 0; break-inside: avoid; }
.card dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: 0 0 .9rem; }
.card dt { color: var(--quiet); font-size: .85rem; padding-top: .1rem; }
.card dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 0; } figure + figure { margin-top: 1rem; }
figcaption { color: var(--quiet); font-size: .85rem; margin-bottom: .35rem; }
img { display: block; max-width: 100%; height: auto; background: #fff; border-radius: 6px; }
section > figure { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .6rem; }
@media (max-width: 36rem) { body { padding: 1.5rem .9rem 3rem; } .card { padding: .9rem; }
  .card dl { grid-template-columns: 1fr; gap: 0; } .card dd { margin-bottom: .4rem; } }
@media print { :root { color-scheme: light; --page: #fff; --card: #fff; --ink: #000; --quiet: #555; --line: #ccc;
  --accent: #000; } body { padding: 0; max-width: none; font-size: 11pt; } h2 { break-after: avoid; }
  .tile, img, tr { break-inside: avoid; } img { max-height: 17cm; object-fit: contain; object-position: left; } }
""".strip()


def write(path: str | Path, title: str, sections: Sequence[str]) -> None:
    """Writes a page of `sections` (markup) headed by `title` (text)."""
    head = ('<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<title>{escape(title)}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n')
    files.write(path, f'{head}<h1>{escape(title)}</h1>\n' + '\n'.join(sections) + '\n</body>\n</html>\n')


def section(heading: str, *blocks: str) -> str:
    return f'<section>\n<h2>{escape(heading)}</h2>\n' + '\n'.join(blocks) + '\n</section>'


def paragraph(text: str, quiet: bool = False) -> str:
    return f'<p class="quiet">{escape(text)}</p>' if quiet else f'<p>{escape(text)}</p>'


def preformatted(text: str) -> str:
    return f'<pre>{escape(text)}</pre>'


def folded(summary: str, *blocks: str) -> str:
    """Blocks that open on a click."""
    return f'<details>\n<summary>{escape(summary)}</summary>\n' + '\n'.join(blocks) + '\n</details>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column stands left, the others (numbers) right."""
    def line(tag: str, cells: Sequence[str]) -> str:
        return '<tr>' + ''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells) + '</tr>'

    body = '\n'.join(line('td', row) for row in rows)
    return f'<div class="wide"><table>\n<thead>{line("th", header)}</thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def tiles(values: Sequence[tuple[str, str]]) -> str:
    """The few numbers that matter, large: (name, value)."""
    each = ''.join(f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
                   for name, value in values)
    return f'<div class="tiles">{each}</div>'


def image(picture: bytes | Figure, alt: str, caption: str = '') -> str:
    """A PNG or a matplotlib figure, at half a CSS pixel a dot so that it is sharp on any screen."""
    data = picture if isinstance(picture, bytes) else heatmap.png(picture)
    width, height = struct.unpack('>II', data[16:24])  # the first chunk of a PNG is its header
    note = f'<figcaption>{escape(caption)}</figcaption>' if caption else ''
    return (f'<figure>{note}<img alt="{escape(alt)}" width="{width // 2}" height="{height // 2}" '
            f'src="data:image/png;base64,{base64.b64encode(data).decode()}"></figure>')


def run_page(workdir: str | Path, split: str = 'test', scores: dict[str, Any] | None = None) -> Path:
    """Writes WORKDIR/report.html of a run and returns its path; reads nothing but the run's directory.

    scores: those to show; None reads them from scores-SPLIT.json.

    config.json         the config; shown, and its model and data fields summed up in a line
    metrics.jsonl       one record a line: {"step", "split", "loss", "bleu", ...}; may be absent
    scores-SPLIT.json   the keys of `SCORES`, each a number, null or absent (exact_match and inversion_* from 0 to 1),
                        "bleu_signature", "chrf_signature", and "by_length": [{"from", "to" (null: no end),
                        "sentences", "bleu"}, ...]
    samples/SPLIT.json  may be absent; a list of {"source", "reference" (or null), "output": text; "rows": produced
                        tokens and "columns": source tokens, both with the end of sentence; "weights": nested lists
                        [rows][columns], or k for array `arr_k` of samples/SPLIT.npz (`np.savez_compressed(path,
                        *matrices)`), or null for a model without attention; "gold": {"sure": [[source index, row],
                        ...], "possible": [...]} (with or without the sure ones) or null}
    figures/eval-SPLIT/pictures.json  may be absent; a list of {"file": a PNG beside it, "caption"}

    Raises UserError where a file is missing or is not JSON, ValueError where labels and weights disagree in size.
    """
    workdir = Path(workdir)
    run = _read(workdir, split, scores)
    path = workdir / 'report.html'
    write(path, f'{workdir.resolve().name}, {split}', _sections({'': run}))
    return path


def compare(path: str | Path, runs: Sequence[str | Path], split: str = 'test') -> Path:
    """Writes a page of two or more runs' directories beside each other, each called by its folder's name.

    Reads what `run_page` reads; raises as it does, and UserError where two folders share a name.
    """
    read = {Path(run).resolve().name: _read(Path(run), split) for run in runs}
    if len(read) < len(runs):
        raise UserError(f'runs to compare need folders of different names, got {", ".join(map(str, runs))}')
    write(path, f'{" and ".join(read)}, {split}', _sections(read))
    return Path(path)


def _sections(runs: Mapping[str, Mapping]) -> list[str]:
    """The page of one run (named '') or more."""
    blocks = [paragraph((f'{name}: ' if name else '') + run['summary'], quiet=True) for name, run in runs.items()]
    if len(runs) == 1:
        (run,) = runs.values()
        blocks.append(tiles([(label.split(',')[0], number(run['scores'][key], form)) for key, label, form in SCORES
                             if key in TILES and _known(run, key)]))
    sections = ['\n'.join(blocks), section('Scores', *_scores(runs))]
    bins = {name: run['scores']['by_length'] for name, run in runs.items() if run['scores'].get('by_length')}
    if bins:
        picture = image(figures.by_length(bins), 'BLEU by source length')
        sections.append(section('BLEU by length of the source', picture))
    metrics = {name: run['metrics'] for name, run in runs.items() if run['metrics']}
    if metrics:
        sections.append(section('Training', image(figures.curves(metrics), 'Loss and validation score by step')))
    if any(run['samples'] for run in runs.values()):
        sections.append(section('Alignments', *_cards(runs)))
    pictures = [image(picture, caption, (f'{name}: ' if name else '') + caption)
                for name, run in runs.items() for picture, caption in run['pictures']]
    if pictures:
        sections.append(section('Pictures', *pictures))
    return [*sections, section('Configuration', *(folded(name or 'All fields', preformatted('\n'.join(
        f'{key} = {json.dumps(value, ensure_ascii=False)}' for key, value in flat(run['config']))))
        for name, run in runs.items()))]


def _scores(runs: Mapping[str, Mapping]) -> list[str]:
    rows = [(label, *(number(run['scores'].get(key), form) for run in runs.values()))
            for key, label, form in SCORES if any(_known(run, key) for run in runs.values())]
    signatures = dict.fromkeys(f'{name}: {run["scores"][key]}' for run in runs.values()
                               for key, name in (('bleu_signature', 'BLEU'), ('bleu_words_signature', 'BLEU of words'),
                                                 ('chrf_signature', 'chrF'))
                               if run['scores'].get(key))
    return [table(['', *(name or 'value' for name in runs)], rows), *(paragraph(s, quiet=True) for s in signatures)]


def _cards(runs: Mapping[str, Mapping]) -> list[str]:
    """A card a source sentence: the outputs of all runs and the heat map of each that attends."""
    by_source = {name: {sample['source']: sample for sample in run['samples']} for name, run in runs.items()}
    sources = list(dict.fromkeys(source for samples in by_source.values() for source in samples))
    cards, left = [], PICTURE_BYTES
    for source in sources:
        found = {name: samples[source] for name, samples in by_source.items() if source in samples}
        pictures = {name: heatmap.png(heatmap.figure(s['weights'], s['rows'], s['columns'], gold=_links(s['gold'])))
                    for name, s in found.items() if s['weights'] is not None}
        left -= sum(map(len, pictures.values()))
        if left < 0:
            break
        cards.append(_card(source, found, pictures))
    lead = 'Each row is a produced token, each column a source token; a row sums to 1, from white (0) to black (1).'
    rest = len(sources) - len(cards)
    more = [paragraph(f'{rest} more samples in the run.', quiet=True)] if rest else []
    return [paragraph(lead, quiet=True), *cards, *more]


def _card(source: str, found: Mapping[str, Mapping], pictures: Mapping[str, bytes]) -> str:
    reference = next(iter(found.values()))['reference']
    lines = [('source', source), *((name or 'output', sample['output']) for name, sample in found.items()),
             *([('reference', reference)] if reference is not None else [])]
    texts = ''.join(f'<dt>{escape(name)}</dt><dd>{escape(line)}</dd>' for name, line in lines)
    images = (image(data, f'Alignment of: {source}', name) for name, data in pictures.items())
    return f'<div class="card"><dl>{texts}</dl>' + ''.join(images) + '</div>'


def _read(workdir: Path, split: str, scores: dict[str, Any] | None = None) -> dict[str, Any]:
    """config, scores, metrics, samples (weights as arrays) and a summary in a line, of one run's directory."""
    config = _json(workdir / 'config.json', 'train')
    if scores is None:
        scores = _json(workdir / f'scores-{split}.json', 'eval')
    samples = workdir / 'samples' / f'{split}.json'
    return {'config': config, 'scores': scores, 'metrics': files.read_records(workdir / 'metrics.jsonl'),
                'samples': _samples(samples) if samples.exists() else [], 'summary': _summary(config),
            'pictures': _pictures(workdir / 'figures' / f'eval-{split}')}


def _pictures(folder: Path) -> list[tuple[bytes, str]]:
    """The pictures that `pictures.json` names, and what they show."""
    index = folder / 'pictures.json'
    if not index.exists():
        return []
    return [((folder / each['file']).read_bytes(), each['caption']) for each in _json(index, 'eval')]


def _json(path: Path, command: str) -> Any:
    try:
        return json.loads(path.read_text('utf-8'))
    except FileNotFoundError:
        raise UserError(f'{path} is missing: `attnlab {command}` writes it') from None
    except (ValueError, RecursionError) as error:
        raise UserError(f'{path} is not JSON: {error}') from None


def _samples(path: Path) -> list[dict]:
    samples = _json(path, 'eval')
    if not any(isinstance(sample['weights'], int) for sample in samples):
        return samples
    with np.load(path.with_suffix('.npz'), allow_pickle=False) as arrays:
        return [{**sample, 'weights': arrays[f'arr_{sample["weights"]}']} if isinstance(sample['weights'], int)
                else sample for sample in samples]


def _links(gold: Mapping | None):
    from attnlab.data.alignments import Links

    if gold is None:
        return None
    sure, possible = (frozenset((source, target) for source, target in gold[kind]) for kind in ('sure', 'possible'))
    return Links(sure, sure | possible)


def _summary(config: Mapping) -> str:
    model, data = config.get('model', {}), config.get('data', {})
    attention = model.get('attention')
    parts = [data.get('name'), model.get('cell'), model.get('mixer'),
             'fixed context' if attention == 'none' else attention and f'{attention} attention',
             model.get('hidden') and f'{model["hidden"]} hidden units',
             model.get('name') if model.get('name') in ('vit', 'resnet') else None,
             model.get('layers') and f'{model["layers"]} layers of width {model["width"]}',
             f'seed {config.get("seed")}']
    return ' · '.join(str(part) for part in parts if part)


def flat(tree: Mapping, prefix: str = '') -> list[tuple[str, Any]]:
    return [pair for key, value in tree.items()
            for pair in (flat(value, f'{prefix}{key}.') if isinstance(value, Mapping) else [(prefix + key, value)])]


def _known(run: Mapping, key: str) -> bool:
    return run['scores'].get(key) is not None


def number(value: float | None, form: str) -> str:
    return '–' if value is None else form.format(value)
