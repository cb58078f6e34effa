"""English to French on sentences of the embedded grammar: attention, or one fixed context vector.

attnlab train --config=experiments/align/grammar_gru.py --workdir=runs/grammar
attnlab train --config=experiments/align/grammar_gru.py:fixed --workdir=runs/grammar_fixed
attnlab eval --workdir=runs/grammar --split=test
attnlab sweep --config=experiments/align/grammar_gru.py --sweep=scores,seeds --workdir=sweeps/scores --workers=2

Two cores of an AMD EPYC, seed 0, 500 test sentences: attention BLEU 97.3, AER 0.046; fixed BLEU 58.3.  `make demo`,
which trains and scores both, takes 4 min 24 s.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict

from attnlab.sweeps import Overrides, grid

SCORES = {'': 'additive', 'dot': 'dot', 'fixed': 'none'}


def get_config(arg: str = '') -> ConfigDict:
    """arg: '' for additive attention, 'dot' for the scaled dot product, 'fixed' for no attention."""
    if arg not in SCORES:
        raise ValueError(f"the argument is {arg!r}; expected '', 'dot' or 'fixed'")
    config = ConfigDict()
    config.task = 'align'
    config.seed = 0
    config.data = dict(
        name='grammar',
        train_examples=40_000,
        test_examples=500,  # of each other split
        vocabulary='words',
        vocabulary_size=2000,
        shared=False,
        widths=(12, 20),
    )
    config.model = dict(
        name='recurrent',
        cell='gru',
        embedding=64,
        hidden=128,
        encoder_layers=1,
        bidirectional=True,
        reverse_source=False,
        attention=SCORES[arg],
        dropout=0.1,
        original=False,  # True: as in the appendix of Bahdanau et al. 2015, which is larger
    )
    config.optimizer = dict(
        name='adam',
        b2=0.999,
        learning_rate=4e-3,
        schedule='cosine',
        warmup='100 steps',
        clip=1.0,
        weight_decay=0.0,
    )
    config.train = dict(
        batch_size=64,
        accumulate=1,
        mesh='data=1',  # of devices that share the work; a step so small is faster on one
        parallel='jit',  # one program over them, or pmap: one on each
        duration='3.5 epochs',
        log_every='50 steps',
        eval_every='1 epoch',
        save_every='1 epoch',
        patience=0,  # evaluations without a better BLEU before the run ends; 0: never
        label_smoothing=0.0,
    )
    config.decode = dict(beams=1, length_penalty=0.0)  # 1: greedy
    return config


def sweep_scores() -> Iterator[Overrides]:
    """The three ways to score a source word, none being one fixed context vector."""
    return grid({'model.attention': ('additive', 'dot', 'none')})


def sweep_seeds() -> Iterator[Overrides]:
    """Three, to go with the scores: --sweep=scores,seeds."""
    return grid({'seed': range(3)})
