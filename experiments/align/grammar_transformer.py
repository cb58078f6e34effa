"""English to French on sentences of the embedded grammar, by a small Transformer.

attnlab train --config=experiments/align/grammar_transformer.py --workdir=runs/grammar_transformer
attnlab eval --workdir=runs/grammar_transformer --split=test

Two cores of an AMD EPYC, seed 0, 500 test sentences: BLEU 98.2, exact match 94.8 %, AER 0.066 (attention of
layer 1 at the step that produces a word; layer 2: 0.080).  1,121,152 parameters.
"""

from ml_collections import ConfigDict

from attnlab.configs import (
    AlignConfig,
    GrammarPairs,
    OptimizerConfig,
    TrainConfig,
    TranslatorConfig,
    config_dict,
)


def get_config(arg: str = '') -> ConfigDict:
    """Return the config.  arg: '' for pre-norm, 'post' for post-norm, as in Vaswani et al. 2017."""
    if arg not in ('', 'post'):
        raise ValueError(f"the argument is {arg!r}; expected '' or 'post'")
    return config_dict(
        AlignConfig(
            data=GrammarPairs(
                train_examples=40_000,
                test_examples=500,
                vocabulary='words',
                vocabulary_size=2000,
                widths=(12, 20),
            ),
            model=TranslatorConfig(
                layers=2,
                width=128,
                heads=4,
                positions='sinusoidal',
                order=arg or 'pre',
                mlp='relu',
                dropout=0.1,
                scaled_init=False,
                init=0.0,
            ),
            optimizer=OptimizerConfig(
                b2=0.98,
                learning_rate=2e-3,
                schedule='cosine',
                warmup='200 steps',
                clip=1.0,
                weight_decay=0.0,
            ),
            train=TrainConfig(
                batch_size=64,
                duration='4 epochs',
                log_every='50 steps',
                eval_every='1 epoch',
                save_every='1 epoch',
                label_smoothing=0.1,
            ),
        )
    )
