"""The HTML page of a run, or of several runs side by side, from the files of their directories."""

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

MAX_PICTURE_BYTES = 1_400_000
"""Bytes of the PNGs of alignments in one page; base64 adds a third, so the page stays under 2 MB."""

TILE_SCORES = ('bleu', 'chrf', 'exact_match', 'aer_emit', 'bits_per_character', 'accuracy', 'top5', 'calibration_error')
"""Scores in large type at the top of a page."""

SCORE_SIGNATURES = {'bleu_signature': 'BLEU', 'bleu_words_signature': 'BLEU of words', 'chrf_signature': 'chrF'}
"""Key in scores-SPLIT.json -> name, of the sacreBLEU signatures."""

SUMMARY_FIELDS = (
    ('data', 'name', '{}'),
    ('model', 'name', '{}'),
    ('model', 'cell', '{}'),
    ('model', 'mixer', '{}'),
    ('model', 'attention', 'attention: {}'),
    ('model', 'hidden', '{} hidden units'),
    ('model', 'layers', '{} layers'),
    ('model', 'width', 'width {}'),
)
"""(section, field, format) of the config fields in the line below a page's title; absent fields are left out."""

Sample = dict[str, Any]
"""A translation in samples/SPLIT.json, with its weights as an array; see `write_run_page`."""

Card = tuple[list[tuple[str, str]], list[html.Picture]]
"""(name, text) lines of a source sentence and its translations, and the heat map of each translation."""


class RunResults(NamedTuple):
    """The files of a run's directory that its page shows.

    metrics: records of metrics.jsonl.  pictures: (PNG, caption) of each picture of the evaluation.
    """

    config: dict[str, Any]
    scores: Mapping[str, Any]
    metrics: list[dict[str, Any]]
    samples: list[Sample]
    pictures: list[tuple[bytes, str]]


def write_run_page(workdir: str | Path, split: str = 'test', scores: dict[str, Any] | None = None) -> Path:
    """Write WORKDIR/report.html of a run and return its path; reads only the run's directory.

    scores: the scores to show; None reads scores-SPLIT.json.

    config.json         the config; its fields are listed, and those of `SUMMARY_FIELDS` are in the summary
    metrics.jsonl       one record per line: {"step", "split", "loss", "bleu", ...}; optional
    scores-SPLIT.json   numbers (null: unknown; exact_match and inversion_* from 0 to 1), the texts of
                        `SCORE_SIGNATURES`, and "by_length": [{"from", "to" (null: no end), "sentences", "bleu"}, ...].
                        The numbers of `values.SCORE_FORMATS` come first
    samples/SPLIT.json  optional; a list of {"source", "reference" (or null), "output": text; "rows": produced tokens
                        and "columns": source tokens, both with the end of sentence; "weights": nested lists
                        [rows][columns], or k for array `arr_k` of samples/SPLIT.npz (`np.savez_compressed(path,
                        *matrices)`), or null for a model without attention; "gold": {"sure": [[source index, row],
                        ...], "possible": [...]} (with or without the sure links) or null}
    figures/eval-SPLIT/pictures.json  optional; a list of {"file": a PNG in the same folder, "caption"}

    Raises UserError if a file is missing or is not JSON, ValueError if labels and weights differ in size.
    """
    workdir = Path(workdir)
    results = _read_results(workdir, split, scores)
    return _write_page(workdir / 'report.html', f'{workdir.resolve().name}, {split}', {'': results})


def write_comparison_page(path: str | Path, runs: Sequence[str | Path], split: str = 'test') -> Path:
    """Write a page of two or more runs side by side and return its path; a run is named by its directory.

    Reads the same files as `write_run_page` and raises the same errors; also UserError if two directories share a name.
    """
    results = {Path(run).resolve().name: _read_results(Path(run), split) for run in runs}
    if len(results) < len(runs):
        raise UserError(f'runs are {", ".join(map(str, runs))}; expected directories with different names')
    return _write_page(Path(path), f'{" and ".join(results)}, {split}', results)


def _write_page(path: Path, title: str, runs: Mapping[str, RunResults]) -> Path:
    """Write the page of one run, whose name is '', or of several."""
    cards, more_samples = _cards(runs)
    signatures = [
        f'{name}: {run.scores[key]}'
        for run in runs.values() for key, name in SCORE_SIGNATURES.items() if run.scores.get(key)
    ]  # fmt: skip
    html.write_html(
        path, 'run.html', title=title, cards=cards, more_samples=more_samples, figures=_figures(runs),
        scores=_score_table(runs), tiles=_tiles(*runs.values()) if len(runs) == 1 else [],
        summaries=[_with_name(name, _summary(run.config)) for name, run in runs.items()],
        signatures=list(dict.fromkeys(signatures)),
        pictures=[html.encode_picture(data, caption, _with_name(name, caption))
                  for name, run in runs.items() for data, caption in run.pictures],
        configs={name: html.config_lines(run.config) for name, run in runs.items()},
    )  # fmt: skip
    return path


def _with_name(name: str, text: str) -> str:
    """Return the text after the name of its run; the only run of a page has the name ''."""
    return f'{name}: {text}' if name else text


def _tiles(run: RunResults) -> list[tuple[str, str]]:
    """Return the label and the value of each score in `TILE_SCORES` that the run has."""
    return [
        (label.split(',')[0], _format_score(key, run.scores[key]))
        for key, (label, _) in SCORE_FORMATS.items()
        if key in TILE_SCORES and run.scores.get(key) is not None
    ]


def _figures(runs: Mapping[str, RunResults]) -> list[tuple[str, html.Picture]]:
    """Return the heading and the picture of each figure."""
    pictures = []
    if lengths := {name: run.scores['by_length'] for name, run in runs.items() if run.scores.get('by_length')}:
        picture = html.encode_picture(figures.plot_bleu_by_length(lengths), 'BLEU by source length')
        pictures.append(('BLEU by source length', picture))
    if metrics := {name: run.metrics for name, run in runs.items() if run.metrics}:
        picture = html.encode_picture(figures.plot_training_curves(metrics), 'Loss and validation score by step')
        pictures.append(('Training', picture))
    return pictures


def _score_table(runs: Mapping[str, RunResults]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: the scores of `SCORE_FORMATS` in its order, then other floats, then integers."""
    order = {key: index for index, key in enumerate(SCORE_FORMATS)}

    def rank(key: str) -> int:
        is_count = any(isinstance(run.scores.get(key), int) for run in runs.values())
        return order.get(key, len(order) + is_count)

    def label(key: str) -> str:
        return SCORE_FORMATS[key][0] if key in SCORE_FORMATS else key.replace('_', ' ').capitalize()

    numbers = [key for run in runs.values() for key, value in run.scores.items() if isinstance(value, int | float)]
    keys = sorted(dict.fromkeys(numbers), key=rank)
    rows = [[label(key), *(_format_score(key, run.scores.get(key)) for run in runs.values())] for key in keys]
    return ['', *(name or 'value' for name in runs)], rows


def _format_score(key: str, value: float | None) -> str:
    if value is None:
        return '–'
    if key in SCORE_FORMATS:
        return SCORE_FORMATS[key][1].format(value)
    return f'{value:,}' if isinstance(value, int) else f'{value:.3f}'


def _cards(runs: Mapping[str, RunResults]) -> tuple[list[Card], int]:
    """Return a card for each source sentence, as many as fit in a page, and the number of sentences left out."""
    by_source = {name: {sample['source']: sample for sample in run.samples} for name, run in runs.items()}
    sources = list(dict.fromkeys(source for samples in by_source.values() for source in samples))
    cards, bytes_left = [], MAX_PICTURE_BYTES
    for source in sources:
        translations = {name: samples[source] for name, samples in by_source.items() if source in samples}
        maps = {name: _heatmap_png(sample) for name, sample in translations.items() if sample['weights'] is not None}
        bytes_left -= sum(map(len, maps.values()))
        if bytes_left < 0:
            break
        reference = next(iter(translations.values()))['reference']
        lines = [('source', source), *((name or 'output', sample['output']) for name, sample in translations.items())]
        lines += [('reference', reference)] if reference is not None else []
        pictures = [html.encode_picture(png, f'Alignment of: {source}', name) for name, png in maps.items()]
        cards.append((lines, pictures))
    return cards, len(sources) - len(cards)


def _heatmap_png(sample: Sample) -> bytes:
    gold = _parse_gold(sample['gold'])
    return heatmap.render_png(heatmap.plot_heatmap(sample['weights'], sample['rows'], sample['columns'], gold=gold))


def _read_results(workdir: Path, split: str, scores: Mapping[str, Any] | None = None) -> RunResults:
    config = _read_json(workdir / 'config.json', 'train')
    samples = workdir / 'samples' / f'{split}.json'
    return RunResults(
        config, scores or _read_json(workdir / f'scores-{split}.json', 'eval'),
        files.read_records(workdir / 'metrics.jsonl'), _read_samples(samples) if samples.exists() else [],
        _read_pictures(workdir / 'figures' / f'eval-{split}'),
    )  # fmt: skip


def _read_pictures(folder: Path) -> list[tuple[bytes, str]]:
    """Return the PNG and the caption of each picture that pictures.json lists."""
    path = folder / 'pictures.json'
    index = _read_json(path, 'eval') if path.exists() else []
    return [((folder / picture['file']).read_bytes(), picture['caption']) for picture in index]


def _read_json(path: Path, command: str) -> Any:
    """Return the contents of a JSON file; `command` is the command that writes it, for the error message."""
    try:
        return json.loads(path.read_text('utf-8'))
    except FileNotFoundError:
        raise UserError(f'{path} is missing: `attnlab {command}` writes it') from None
    except (ValueError, RecursionError) as error:
        raise UserError(f'{path} is not JSON: {error}') from None


def _read_samples(path: Path) -> list[Sample]:
    """Return the samples of a JSON file; weights given by a number are read from the .npz file of the same name."""
    samples = _read_json(path, 'eval')
    if not any(isinstance(sample['weights'], int) for sample in samples):
        return samples
    with np.load(path.with_suffix('.npz'), allow_pickle=False) as arrays:
        return [{**sample, 'weights': arrays[f'arr_{sample["weights"]}']} if isinstance(sample['weights'], int)
                else sample for sample in samples]  # fmt: skip


def _parse_gold(gold: Mapping[str, Any] | None) -> GoldLinks | None:
    if gold is None:
        return None
    sure, possible = (frozenset((source, target) for source, target in gold[kind]) for kind in ('sure', 'possible'))
    return GoldLinks(sure, sure | possible)


def _summary(config: Mapping[str, Any]) -> str:
    """Return the values of `SUMMARY_FIELDS` and the seed in one line."""
    values = [(form, config.get(section, {}).get(key)) for section, key, form in SUMMARY_FIELDS]
    return ' · '.join([*(form.format(value) for form, value in values if value), f'seed {config.get("seed")}'])
