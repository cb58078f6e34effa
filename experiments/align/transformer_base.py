"""The Transformer (base) of Vaswani et al. 2017, table 3, on sentence pairs of yours: 63,082,496 parameters.

attnlab train --config=experiments/align/transformer_base.py --workdir=runs/base \
    --config.data.train=path/train --config.data.valid=path/valid --config.data.test=path/test
attnlab count --config=experiments/align/transformer_base.py

With 37,000 sub-words that both languages share; a small corpus gives fewer.
"""

from ml_collections import ConfigDict

from attnlab.tasks import transformer


def get_config(arg: str = '') -> ConfigDict:
    """It takes no argument."""
    if arg:
        raise ValueError(f"the argument is {arg!r}; expected ''")
    config = ConfigDict()
    config.task = 'align'
    config.seed = 0
    config.data = dict(
        name='files',
        languages=('en', 'fr'),  # the files' suffixes, source first; French and English spacing are known
        train='',  # two files X.en and X.fr, plain or .gz: --config.data.train=X
        valid='',
        test='',
        vocabulary='subwords',
        vocabulary_size=37000,
        shared=True,  # one vocabulary for both languages
        widths=(16, 32, 48, 64, 96, 128, 256),
    )
    config.model = transformer.fields(
        name='transformer',
        layers=6,
        width=512,
        heads=8,
        context=256,
        positions='sinusoidal',
        order='post',
        mlp='relu',
        mlp_width=2048,
        dropout=0.1,
        scaled_init=False,
        init=0.0,
        shared_embedding=True,
        alignment_layer=5,  # whose cross-attention is the alignment, from 1
        alignment_shift=0,  # 1: read where a word is fed, one step after it is made
    )
    config.optimizer = dict(
        name='adam',
        b2=0.98,
        learning_rate=7e-4,
        schedule='rsqrt',
        warmup='4000 steps',
        clip=0.0,
        weight_decay=0.0,
    )
    config.train = dict(
        batch_size=800,  # about 25,000 tokens of each language
        accumulate=1,
        mesh='data=0',  # of devices that share the work; data=0: as many as divide the rows of a batch
        parallel='jit',  # one program over them, or pmap: one on each
        duration='100000 steps',
        log_every='100 steps',
        eval_every='5000 steps',
        save_every='1000 steps',
        patience=0,
        label_smoothing=0.1,
    )
    config.decode = dict(beams=4, length_penalty=0.6)
    return config
