"""The models of Bahdanau et al. 2015, appendix A: RNNsearch 80,401,000 parameters, RNNencdec 68,540,000 parameters.

attnlab train --config=experiments/align/rnnsearch.py --workdir=runs/rnnsearch \
    --config.data.train=path/train --config.data.valid=path/valid --config.data.test=path/test
attnlab count --config=experiments/align/rnnsearch.py:fixed

The architecture is exactly that of the appendix, with 30,000 words for each language.  The optimizer is Adam; the paper
uses Adadelta.
"""

from ml_collections import ConfigDict

from attnlab.configs import (
    AlignConfig,
    DecodeConfig,
    OptimizerConfig,
    PairFiles,
    RecurrentConfig,
    TrainConfig,
    config_dict,
)


def get_config(arg: str = '') -> ConfigDict:
    """Return the config.

    arg: '' for RNNsearch, 'fixed' for RNNencdec, with a unidirectional encoder and one fixed context vector.
    """
    if arg not in ('', 'fixed'):
        raise ValueError(f"the argument is {arg!r}; expected '' or 'fixed'")
    return config_dict(
        AlignConfig(
            data=PairFiles(
                vocabulary='words',
                vocabulary_size=30000,
                widths=(10, 20, 30, 40, 50),
            ),
            model=RecurrentConfig(
                cell='gru',
                embedding=620,
                hidden=1000,
                bidirectional=not arg,
                attention='none' if arg else 'additive',
                original=True,
            ),
            optimizer=OptimizerConfig(
                b2=0.999,
                learning_rate=5e-4,
                schedule='constant',
                warmup='1000 steps',
                clip=1.0,
                weight_decay=0.0,
            ),
            train=TrainConfig(
                batch_size=80,
                duration='5 epochs',
                log_every='100 steps',
                eval_every='5000 steps',
                save_every='1000 steps',
                label_smoothing=0.0,
            ),
            decode=DecodeConfig(beams=12, length_penalty=0.0),
        )
    )
