"""The models of Bahdanau et al. 2015, appendix A: RNNsearch 80,401,000 parameters, RNNencdec 68,540,000 parameters.

attnlab train --config=experiments/align/rnnsearch.py --workdir=runs/rnnsearch \
    --config.data.train=path/train --config.data.valid=path/valid --config.data.test=path/test
attnlab count --config=experiments/align/rnnsearch.py:fixed

To the letter of the appendix, with 30,000 words a language; trained with Adam where the paper has Adadelta.
"""

from ml_collections import ConfigDict


def get_config(arg: str = '') -> ConfigDict:
    """arg: '' for RNNsearch, 'fixed' for RNNencdec, which reads one way and keeps one context vector."""
    if arg not in ('', 'fixed'):
        raise ValueError(f"the argument is {arg!r}; expected '' or 'fixed'")
    config = ConfigDict()
    config.task = 'align'
    config.seed = 0
    config.data = dict(
        name='files',
        languages=('en', 'fr'),  # the files' suffixes, source first; French and English spacing are known
        train='',  # two files X.en and X.fr, plain or .gz: --config.data.train=X
        valid='',
        test='',
        vocabulary='words',
        vocabulary_size=30000,
        shared=False,
        widths=(10, 20, 30, 40, 50),
    )
    config.model = dict(
        name='recurrent',
        cell='gru',
        embedding=620,
        hidden=1000,
        encoder_layers=1,
        bidirectional=not arg,
        reverse_source=False,
        attention='none' if arg else 'additive',
        dropout=0.0,
        original=True,
    )
    config.optimizer = dict(
        name='adam',
        b2=0.999,
        learning_rate=5e-4,
        schedule='constant',
        warmup='1000 steps',
        clip=1.0,
        weight_decay=0.0,
    )
    config.train = dict(
        batch_size=80,
        accumulate=1,
        mesh='data=0',  # of devices that share the work; data=0: as many as divide the rows of a batch
        parallel='jit',  # one program over them, or pmap: one on each
        duration='5 epochs',
        log_every='100 steps',
        eval_every='5000 steps',
        save_every='1000 steps',
        patience=0,
        label_smoothing=0.0,
    )
    config.decode = dict(beams=12, length_penalty=0.0)
    return config
