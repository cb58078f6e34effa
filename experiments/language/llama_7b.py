"""LLaMA-7B (Touvron et al. 2023, table 2): RMSNorm, SwiGLU, rotary positions, no biases; 6,738,415,616 parameters.

attnlab count --config=experiments/language/llama_7b.py
attnlab train --config=experiments/language/llama_7b.py --workdir=runs/llama --config.data.path=text.txt
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
        vocabulary_size=32000,
    )
    config.model = transformer.fields(
        name='language',
        tied=False,
        layers=32,
        width=4096,
        heads=32,
        context=2048,
        positions='rotary',
        norm='rms',
        mlp='swiglu',
        mlp_width=11008,
        use_bias=False,
        dtype='bfloat16',
        scan=True,
        remat='full',
    )
    config.optimizer = dict(
        name='adam',
        b2=0.95,
        learning_rate=3e-4,
        schedule='cosine',
        warmup='2000 steps',
        clip=1.0,
        weight_decay=0.1,
    )
    config.train = dict(
        batch_size=2048,
        accumulate=2048,
        mesh='data=0',  # of devices that share the work; data=0: as many as divide the rows of a batch
        parallel='jit',  # one program over them, or pmap: one on each
        duration='250000 steps',
        log_every='10 steps',
        eval_every='1000 steps',
        save_every='1000 steps',
        patience=0,
        label_smoothing=0.0,
    )
    return config
