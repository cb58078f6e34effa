"""CIFAR-10 on two CPU cores in less than an hour: a compact convolutional Transformer, and what stands beside it.

attnlab train --config=experiments/vision/cifar10_small.py --workdir=runs/cct
attnlab train --config=experiments/vision/cifar10_small.py:vit --workdir=runs/vit
attnlab train --config=experiments/vision/cifar10_small.py:resnet --workdir=runs/resnet
attnlab eval --workdir=runs/cct

Two cores of an AMD EPYC, seed 0: 82.0 % of the test images in 59 minutes, with tests beside it; the plain ViT 76.9 %
after as many epochs (docs/vision.md).  The residual network was not run yet.
"""

from ml_collections import ConfigDict

from attnlab.tasks import vit

MODELS = {
    # Hassani et al. 2021, CCT-2/3x2.
    '': vit.fields(
        name='vit', embedding='tokenizer', convolutions=2, pool='attention', layers=2, width=128, heads=2,
        mlp_width=128, layer_drop=0.1,
    ),
    'vit': vit.fields(name='vit', **vit.SIZES['CIFAR-Ti'], mlp_width=192, layer_drop=0.1),
    'resnet': dict(name='resnet', image=(32, 32), width=16, blocks=3),
}  # fmt: skip


def get_config(arg: str = '') -> ConfigDict:
    """arg: '' for the compact convolutional Transformer, 'vit' for a plain one, 'resnet' for a residual network."""
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
        policy='none',  # none, trivial, rand
        operations=2,  # of rand
        strength=0.5,
        erase=0.0,
        mixup=0.0,
        cutmix=0.0,
    )
    config.model = MODELS[arg]
    config.optimizer = dict(
        name='adam',
        b2=0.999,
        learning_rate=2e-3,
        layer_decay=1.0,
        schedule='cosine',
        warmup='2 epochs',
        clip=1.0,
        weight_decay=0.05,
    )
    config.train = dict(
        batch_size=128,
        accumulate=1,
        mesh='data=0',  # of devices that share the work; data=0: as many as divide the rows of a batch
        parallel='jit',  # one program over them, or pmap: one on each
        duration='30 epochs',
        log_every='50 steps',
        eval_every='1 epoch',
        save_every='1 epoch',
        patience=0,
        label_smoothing=0.1,
        ema=0.998,  # of the parameters, an average that is evaluated and used; 0: none
    )
    return config
