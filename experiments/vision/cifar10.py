"""CIFAR-10 on one GPU in 200 epochs: a Vision Transformer of 6 layers with patches of 4 x 4.

attnlab train --config=experiments/vision/cifar10.py --workdir=runs/cifar10
attnlab train --config=experiments/vision/cifar10.py:cct --workdir=runs/cifar10_cct
attnlab eval --workdir=runs/cifar10
"""

from ml_collections import ConfigDict

from attnlab.tasks import vit

MODELS = {
    '': vit.fields(name='vit', **vit.SIZES['CIFAR-S'], dtype='bfloat16', qk_norm='rms', layer_drop=0.1),
    # Hassani et al. 2021, CCT-7/3x1.
    'cct': vit.fields(
        name='vit', embedding='tokenizer', convolutions=1, pool='attention', layers=7, width=256, heads=4,
        mlp_width=512, dtype='bfloat16', layer_drop=0.1,
    ),
}  # fmt: skip


def get_config(arg: str = '') -> ConfigDict:
    """arg: '' for patches, 'cct' for a convolutional tokenizer."""
    if arg not in MODELS:
        raise ValueError(f'the argument is {arg!r}; expected one of {", ".join(map(repr, MODELS))}')
    config = ConfigDict()
    config.task = 'vision'
    config.seed = 0
    config.start = ''  # the directory of a run to start from
    config.data = dict(
        name='cifar10',
        folder='',  # one with the published layout or archive; else $ATTNLAB_DATA/cifar10, else a download
        held_out=1000,  # of the images to train on, to choose by
        crop=4,
        flip=True,
        policy='trivial',  # none, trivial, rand
        operations=2,  # of rand
        strength=0.5,
        erase=0.25,
        mixup=0.2,
        cutmix=1.0,
    )
    config.model = MODELS[arg]
    config.optimizer = dict(
        name='adam',
        b2=0.999,
        learning_rate=1e-3,
        layer_decay=1.0,
        schedule='cosine',
        warmup='10 epochs',
        clip=1.0,
        weight_decay=0.1,
    )
    config.train = dict(
        batch_size=256,
        accumulate=1,
        devices=0,  # that share each batch; 0: all of this machine that divide it
        parallel='jit',  # one program over them, or pmap: one on each
        duration='200 epochs',
        log_every='100 steps',
        eval_every='2 epochs',
        save_every='10 epochs',
        patience=0,
        label_smoothing=0.1,
        ema=0.9995,  # of the parameters, an average that is evaluated and used; 0: none
    )
    return config
