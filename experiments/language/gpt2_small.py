"""GPT-2 small on a text of yours (Radford et al. 2019; the optimizer's fields are nanoGPT's): 124,439,808 parameters.

attnlab train --config=experiments/language/gpt2_small.py --workdir=runs/gpt2 --config.data.path=text.txt
attnlab count --config=experiments/language/gpt2_small.py

Sub-words are made from the text itself, so a small one gives fewer of them, and a smaller model, than counted.
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
        layers=12,
        width=768,
        heads=12,
        context=1024,
        mlp='gelu_tanh',
    )
    config.optimizer = dict(
        name='adam',
        b2=0.95,
        learning_rate=6e-4,
        schedule='cosine',
        warmup='2000 steps',
        clip=1.0,
        weight_decay=0.1,
    )
    config.train = dict(
        batch_size=480,
        accumulate=40,
        mesh='data=0',  # of devices that share the work; data=0: as many as divide the rows of a batch
        parallel='jit',  # one program over them, or pmap: one on each
        duration='600000 steps',
        log_every='10 steps',
        eval_every='1000 steps',
        save_every='1000 steps',
        patience=0,
        label_smoothing=0.0,
    )
    return config
