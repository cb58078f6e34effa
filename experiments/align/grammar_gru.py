"""English to French on sentences of the embedded grammar, by GRUs with attention or one fixed context vector.

attnlab train --config=experiments/align/grammar_gru.py --workdir=runs/grammar
attnlab train --config=experiments/align/grammar_gru.py:fixed --workdir=runs/grammar_fixed
attnlab eval --workdir=runs/grammar --split=test
attnlab sweep --config=experiments/align/grammar_gru.py --sweep=scores,seeds --workdir=sweeps/scores --workers=2

Two cores of an AMD EPYC, seed 0, 500 test sentences: attention BLEU 97.3, AER 0.046; fixed BLEU 58.3.  `make demo`,
which trains and scores both, takes 4 min 24 s.
"""

from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from attnlab.configs import (
    AlignConfig,
    GrammarPairs,
    OptimizerConfig,
    RecurrentConfig,
    TrainConfig,
    config_dict,
)
from attnlab.sweeps import Overrides, grid

SCORES: dict[str, Any] = {'': 'additive', 'dot': 'dot', 'fixed': 'none'}


def get_config(arg: str = '') -> ConfigDict:
    """Return the config.  arg: '' for additive attention, 'dot' for scaled dot product, 'fixed' for no attention."""
    if arg not in SCORES:
        raise ValueError(f"the argument is {arg!r}; expected '', 'dot' or 'fixed'")
    return config_dict(
        AlignConfig(
            data=GrammarPairs(
                train_examples=40_000,
                test_examples=500,
                vocabulary='words',
                vocabulary_size=2000,
                widths=(12, 20),
            ),
            model=RecurrentConfig(
                cell='gru',
                embedding=64,
                hidden=128,
                attention=SCORES[arg],
                dropout=0.1,
            ),
            optimizer=OptimizerConfig(
                b2=0.999,
                learning_rate=4e-3,
                schedule='cosine',
                warmup='100 steps',
                clip=1.0,
                weight_decay=0.0,
            ),
            train=TrainConfig(
                batch_size=64,
                mesh='data=1',  # so small a step is faster on one device than on several
                duration='3.5 epochs',
                log_every='50 steps',
                eval_every='1 epoch',
                save_every='1 epoch',
                label_smoothing=0.0,
            ),
        )
    )


def sweep_scores() -> Iterator[Overrides]:
    """The three attention scores; none: one fixed context vector."""
    return grid({'model.attention': ('additive', 'dot', 'none')})


def sweep_seeds() -> Iterator[Overrides]:
    """Three seeds, to combine with the scores: --sweep=scores,seeds."""
    return grid({'seed': range(3)})
