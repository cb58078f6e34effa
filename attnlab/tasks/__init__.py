"""Data, model, loss, scores and pictures of each kind of experiment, found by the config's `task`."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from attnlab import config as configs
from attnlab.errors import UserError


def module(config: Any) -> ModuleType:
    """The task that a config names."""
    match config.task:
        case 'align':
            from attnlab.tasks import align

            return align
        case name:
            raise UserError(f"task is {name!r}; expected 'align'")


def train(config: Any, workdir: Path) -> dict[str, float]:
    """Trains a config in a directory, or goes on where its last run stopped."""
    from attnlab.train import loop

    workdir = Path(workdir)
    kind = module(config)
    kind.check(config)
    saved = workdir / 'config.json'
    if saved.exists():
        configs.check_same(config, configs.read(saved))
    workdir.mkdir(parents=True, exist_ok=True)
    task = kind.build(config, workdir)
    configs.save(config, saved)
    return loop.train(config, task, workdir)


def evaluate(workdir: Path, split: str) -> dict[str, Any]:
    """Scores the best parameters of a run on a whole split, prints and writes them, with samples and the page."""
    workdir = Path(workdir)
    config = configs.read(workdir / 'config.json')
    kind = module(config)
    scores = kind.evaluate(config, workdir, split)
    (workdir / f'scores-{split}.json').write_text(
        json.dumps(scores, indent=1, ensure_ascii=False, allow_nan=False) + '\n', encoding='utf-8'
    )
    kind.show(workdir, split, scores)
    return scores


def translate(workdir: Path, sentences: Sequence[str], joined: bool) -> list[str]:
    """Prints and returns the French of each sentence, and draws its alignment."""
    workdir = Path(workdir)
    config = configs.read(workdir / 'config.json')
    return module(config).translate(config, workdir, sentences, joined)
