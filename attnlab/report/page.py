"""The page of a run, and of several runs beside each other, from what lies in their directories."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attnlab import files
from attnlab.data.alignments import GoldLinks
from attnlab.errors import UserError
from attnlab.report import figures, html
from attnlab.report.values import SCORE_FORMATS
from attnlab.tasks import heatmap

MAX_PICTURE_BYTES = 1_400_000  # of PNGs in one page: a third more as base64, which keeps a page under 2 MB

TILE_SCORES = ('bleu', 'chrf', 'exact_match', 'aer_emit', 'bits_per_character', 'accuracy', 'top5', 'calibration_error')

SCORE_SIGNATURES = {'bleu_signature': 'BLEU', 'bleu_words_signature': 'BLEU of words', 'chrf_signature': 'chrF'}

SUMMARY_FIELDS = (  # fields of a config, where it has them, in the line below a page's title
    ('data', 'name', '{}'),
    ('model', 'name', '{}'),
    ('model', 'cell', '{}'),
    ('model', 'mixer', '{}'),
    ('model', 'attention', 'attention: {}'),
    ('model', 'hidden', '{} hidden units'),
    ('model', 'layers', '{} layers'),
    ('model', 'width', 'width {}'),
)


class RunResults(NamedTuple):
    """What lies in a run's directory. samples: weights as arrays. pictures: PNGs with captions."""

    config: dict[str, Any]
    scores: Mapping[str, Any]
    metrics: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    pictures: list[tuple[bytes, str]]


def write_run_page(workdir: str | Path, split: str = 'test', scores: dict[str, Any] | None = None) -> Path:
    """Write WORKDIR/report.html of a run and return its path; reads nothing but the run's directory.

    scores: those to show; None reads them from scores-SPLIT.json.

    config.json         the config; shown, and its model and data fields summed up in a line
    metrics.jsonl       one record a line: {"step", "split", "loss", "bleu", ...}; may be absent
    scores-SPLIT.json   numbers (null: unknown; exact_match and inversion_* from 0 to 1), those of `values.SCORE_FORMATS`
                        first, the texts of `SCORE_SIGNATURES`, and "by_length": [{"from", "to" (null: no end), "sentences",
                        "bleu"}, ...]
    samples/SPLIT.json  may be absent; a list of {"source", "reference" (or null), "output": text; "rows": produced
                        tokens and "columns": source tokens, both with the end of sentence; "weights": nested lists
                        [rows][columns], or k for array `arr_k` of samples/SPLIT.npz (`np.savez_compressed(path,
                        *matrices)`), or null for a model without attention; "gold": {"sure": [[source index, row],
                        ...], "possible": [...]} (with or without the sure ones) or null}
    figures/eval-SPLIT/pictures.json  may be absent; a list of {"file": a PNG beside it, "caption"}

    Raises UserError where a file is missing or is not JSON, ValueError where labels and weights disagree in size.
    """
    workdir = Path(workdir)
    return _write(workdir / 'report.html', f'{workdir.resolve().name}, {split}', {'': _read(workdir, split, scores)})


def write_comparison_page(path: str | Path, runs: Sequence[str | Path], split: str = 'test') -> Path:
    """Write a page of two or more runs' directories beside each other, each called by its folder's name.

    Reads what `write_run_page` reads; raises as it does, and UserError where two folders share a name.
    """
    read = {Path(run).resolve().name: _read(Path(run), split) for run in runs}
    if len(read) < len(runs):
        raise UserError(f'runs to compare need folders of different names, got {", ".join(map(str, runs))}')
    return _write(Path(path), f'{" and ".join(read)}, {split}', read)


def _write(path: Path, title: str, runs: Mapping[str, RunResults]) -> Path:
    """Write the page of one run (named '') or more."""
    of = lambda name: f'{name}: ' if name else ''
    cards, more = _cards(runs)
    html.write_html(
        path, 'run.html', title=title, cards=cards, more_samples=more, figures=_figures(runs), scores=_scores(runs),
        summaries=[of(name) + _summary(run.config) for name, run in runs.items()],
        large=[(SCORE_FORMATS[key][0].split(',')[0], _number(key, run.scores[key])) for run in runs.values()
               for key in SCORE_FORMATS if key in TILE_SCORES and run.scores.get(key) is not None] if len(runs) == 1 else [],
        signatures=dict.fromkeys(f'{name}: {run.scores[key]}' for run in runs.values()
                                 for key, name in SCORE_SIGNATURES.items() if run.scores.get(key)),
        pictures=[html.encode_picture(data, caption, of(name) + caption)
                  for name, run in runs.items() for data, caption in run.pictures],
        configs={name: html.config_lines(run.config) for name, run in runs.items()},
    )  # fmt: skip
    return path


def _figures(runs: Mapping[str, RunResults]) -> list[tuple[str, html.Picture]]:
    found = []
    if bins := {name: run.scores['by_length'] for name, run in runs.items() if run.scores.get('by_length')}:
        picture = html.encode_picture(figures.plot_bleu_by_length(bins), 'BLEU by source length')
        found.append(('BLEU by length of the source', picture))
    if metrics := {name: run.metrics for name, run in runs.items() if run.metrics}:
        found.append(
            (
                'Training',
                html.encode_picture(figures.plot_training_curves(metrics), 'Loss and validation score by step'),
            )
        )
    return found


def _scores(runs: Mapping[str, RunResults]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: the numbers that `SCORES` names, then all others, counts last."""
    known = [key for run in runs.values() for key, value in run.scores.items() if isinstance(value, int | float)]
    order = {key: at for at, key in enumerate(SCORE_FORMATS)}
    is_count = lambda key: any(isinstance(run.scores.get(key), int) for run in runs.values())
    keys = sorted(dict.fromkeys(known), key=lambda key: order.get(key, len(order) + is_count(key)))
    label = lambda key: SCORE_FORMATS[key][0] if key in SCORE_FORMATS else key.replace('_', ' ').capitalize()
    rows = [[label(key), *(_number(key, run.scores.get(key)) for run in runs.values())] for key in keys]
    return ['', *(name or 'value' for name in runs)], rows


def _number(key: str, value: float | None) -> str:
    if value is None:
        return '–'
    return (
        SCORE_FORMATS[key][1].format(value)
        if key in SCORE_FORMATS
        else f'{value:,}'
        if isinstance(value, int)
        else f'{value:.3f}'
    )


def _cards(runs: Mapping[str, RunResults]) -> tuple[list[tuple[list[tuple[str, str]], list[html.Picture]]], int]:
    """(lines, heat maps) of each source sentence, as many as fit in a page, and the number of the others."""
    by_source = {name: {sample['source']: sample for sample in run.samples} for name, run in runs.items()}
    sources = list(dict.fromkeys(source for samples in by_source.values() for source in samples))
    cards, left = [], MAX_PICTURE_BYTES
    for source in sources:
        found = {name: samples[source] for name, samples in by_source.items() if source in samples}
        maps = {name: heatmap.render_png(heatmap.plot_heatmap(s['weights'], s['rows'], s['columns'], gold=_links(s['gold'])))
                for name, s in found.items() if s['weights'] is not None}  # fmt: skip
        left -= sum(map(len, maps.values()))
        if left < 0:
            break
        reference = next(iter(found.values()))['reference']
        lines = [('source', source), *((name or 'output', sample['output']) for name, sample in found.items())]
        lines += [('reference', reference)] if reference is not None else []
        cards.append(
            (lines, [html.encode_picture(data, f'Alignment of: {source}', name) for name, data in maps.items()])
        )
    return cards, len(sources) - len(cards)


def _read(workdir: Path, split: str, scores: Mapping[str, Any] | None = None) -> RunResults:
    config = _json(workdir / 'config.json', 'train')
    samples = workdir / 'samples' / f'{split}.json'
    return RunResults(
        config, scores or _json(workdir / f'scores-{split}.json', 'eval'),
        files.read_records(workdir / 'metrics.jsonl'), _samples(samples) if samples.exists() else [],
        _pictures(workdir / 'figures' / f'eval-{split}'),
    )  # fmt: skip


def _pictures(folder: Path) -> list[tuple[bytes, str]]:
    index = folder / 'pictures.json'
    each = _json(index, 'eval') if index.exists() else []
    return [((folder / picture['file']).read_bytes(), picture['caption']) for picture in each]


def _json(path: Path, command: str) -> Any:
    try:
        return json.loads(path.read_text('utf-8'))
    except FileNotFoundError:
        raise UserError(f'{path} is missing: `attnlab {command}` writes it') from None
    except (ValueError, RecursionError) as error:
        raise UserError(f'{path} is not JSON: {error}') from None


def _samples(path: Path) -> list[dict[str, Any]]:
    samples = _json(path, 'eval')
    if not any(isinstance(sample['weights'], int) for sample in samples):
        return samples
    with np.load(path.with_suffix('.npz'), allow_pickle=False) as arrays:
        return [{**sample, 'weights': arrays[f'arr_{sample["weights"]}']} if isinstance(sample['weights'], int)
                else sample for sample in samples]  # fmt: skip


def _links(gold: Mapping[str, Any] | None) -> GoldLinks | None:
    if gold is None:
        return None
    sure, possible = (frozenset((source, target) for source, target in gold[kind]) for kind in ('sure', 'possible'))
    return GoldLinks(sure, sure | possible)


def _summary(config: Mapping[str, Any]) -> str:
    found = [(form, config.get(section, {}).get(key)) for section, key, form in SUMMARY_FIELDS]
    return ' · '.join([*(form.format(value) for form, value in found if value), f'seed {config.get("seed")}'])
