"""GPT-3 175B (Brown et al. 2020, table 2.1): 174,604,259,328 parameters, for counting.

attnlab count --config=experiments/language/gpt3_175b.py
attnlab train --config=experiments/language/gpt3_175b.py --workdir=runs/gpt3 --config.data.path=text.txt

All of its layers attend to all of the past, where the paper's alternate with banded ones.
"""

from ml_collections import ConfigDict

from attnlab.tasks import transformer


def get_config(arg: str = '') -> ConfigDict:
    """It takes no argument."""
    if arg:
        raise ValueError(f"the argument is {arg!r}; expected ''")
    config = ConfigDict()
    config.task = 'language'
    config.seed = 0
    config.data = dict(
        name='file',
        path='',  # a text file: --config.data.path=FILE
        share=0.9,  # of it, to train on
        documents='paragraphs',  # what parts it: lines, paragraphs, or a string
        vocabulary='subwords',
        vocabulary_size=50257,
    )
    config.model = transformer.fields(
        name='language',
        tied=True,
        layers=96,
        width=12288,
        heads=96,
        context=2048,
        mlp='gelu_tanh',
        dtype='bfloat16',
        scan=True,
        remat='full',
    )
    config.optimizer = dict(
        name='adam',
        b2=0.95,
        learning_rate=6e-5,
        schedule='cosine',
        warmup='120 steps',
        clip=1.0,
        weight_decay=0.1,
    )
    config.train = dict(
        batch_size=1536,
        accumulate=1536,
        mesh='data=0',  # of devices that share the work; data=0: as many as divide the rows of a batch
        parallel='jit',  # one program over them, or pmap: one on each
        duration='95000 steps',
        log_every='10 steps',
        eval_every='1000 steps',
        save_every='1000 steps',
        patience=0,
        label_smoothing=0.0,
    )
    return config
