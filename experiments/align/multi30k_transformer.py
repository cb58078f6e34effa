"""English to French on the 29,000 captions of Multi30k, by a Transformer of the size of Transformer-Tiny.

attnlab train --config=experiments/align/multi30k_transformer.py --workdir=runs/multi30k_transformer
attnlab eval --workdir=runs/multi30k_transformer --split=test

Two cores of an AMD EPYC, shared with other work, seed 0, 47 minutes, 2,861,568 parameters, beams of 5: sacreBLEU 58.4
on test 2016 and 48.9 on test 2017; of lower-cased words, as papers score, 59.4 and 50.2.  Wu et al. 2021 report 61.8
and 53.5 for their Transformer-Tiny (2.55 million parameters, 3.5 times as many tokens).
"""

from ml_collections import ConfigDict

from attnlab.tasks import transformer


def get_config(arg: str = '') -> ConfigDict:
    """arg: '' for pre-norm, 'post' for the order of 2017."""
    if arg not in ('', 'post'):
        raise ValueError(f"the argument is {arg!r}; expected '' or 'post'")
    config = ConfigDict()
    config.task = 'align'
    config.seed = 0
    config.data = dict(
        name='multi30k',
        folder='',  # one that holds train.en.gz and so on; else $ATTNLAB_DATA/multi30k, else a download
        vocabulary='subwords',
        vocabulary_size=6000,
        shared=False,
        widths=(12, 16, 20, 28, 48),
    )
    config.model = transformer.fields(
        name='transformer',
        layers=4,
        width=128,
        heads=4,
        positions='sinusoidal',
        order=arg or 'pre',
        mlp='relu',
        mlp_width=256,
        dropout=0.2,
        scaled_init=False,
        init=0.0,
        shared_embedding=False,
        alignment_layer=3,  # whose cross-attention is the alignment, from 1
        alignment_shift=0,  # 1: read where a word is fed, one step after it is made
    )
    config.optimizer = dict(
        name='adam',
        b2=0.98,
        learning_rate=2e-3,
        schedule='cosine',
        warmup='500 steps',
        clip=1.0,
        weight_decay=0.0,
    )
    config.train = dict(
        batch_size=128,
        accumulate=1,
        mesh='data=0',  # of devices that share the work; data=0: as many as divide the rows of a batch
        parallel='jit',  # one program over them, or pmap: one on each
        duration='20 epochs',
        log_every='50 steps',
        eval_every='1 epoch',
        save_every='1 epoch',
        patience=0,
        label_smoothing=0.1,
    )
    config.decode = dict(beams=5, length_penalty=1.0)
    return config
