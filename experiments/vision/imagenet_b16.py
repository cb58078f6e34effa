"""The models of Dosovitskiy et al. 2021 and Touvron et al. 2021, to count: ViT-B/16 86,567,656 parameters.

attnlab count --config=experiments/vision/imagenet_b16.py
attnlab count --config=experiments/vision/imagenet_b16.py:L/16
attnlab train --config=experiments/vision/imagenet_b16.py --workdir=runs/imagenet \
    --config.data.train=train.npz --config.data.test=test.npz

Ti/16 has 5,717,416, S/16 22,050,664, L/16 304,326,632 and H/14 632,045,800: 224 x 224 pixels, 1,000 classes, a class
token.
"""

from ml_collections import ConfigDict

from attnlab.tasks import vit

SIZES = {'Ti/16': 16, 'S/16': 16, 'B/16': 16, 'L/16': 16, 'H/14': 14}


def get_config(arg: str = '') -> ConfigDict:
    """arg: size and patch; '' for B/16."""
    arg = arg or 'B/16'
    if arg not in SIZES:
        raise ValueError(f'the argument is {arg!r}; expected one of {", ".join(map(repr, SIZES))}')
    config = ConfigDict()
    config.task = 'vision'
    config.seed = 0
    config.start = ''  # the directory of a run to start from
    config.data = dict(
        name='files',
        train='',  # .npz with images uint8 [n, height, width, channels] and labels [n]
        test='',
        held_out=1000,
        shape=(224, 224, 3),
        classes=1000,
        crop=16,
        flip=True,
        policy='rand',  # none, trivial, rand
        operations=2,  # of rand
        strength=0.9,
        erase=0.25,
        mixup=0.8,
        cutmix=1.0,
    )
    config.model = vit.fields(
        **vit.SIZES[arg.split('/')[0]],
        name='vit',
        image=(224, 224),
        patch=(SIZES[arg], SIZES[arg]),
        pool='class',
        dtype='bfloat16',
        scan=True,
    )
    config.optimizer = dict(
        name='adam',
        b2=0.999,
        learning_rate=1e-3,
        layer_decay=1.0,
        schedule='cosine',
        warmup='5 epochs',
        clip=1.0,
        weight_decay=0.05,
    )
    config.train = dict(
        batch_size=1024,
        accumulate=1,
        mesh='data=0',  # of devices that share the work; data=0: as many as divide the rows of a batch
        parallel='jit',  # one program over them, or pmap: one on each
        duration='300 epochs',
        log_every='100 steps',
        eval_every='5 epochs',
        save_every='5 epochs',
        patience=0,
        label_smoothing=0.1,
        ema=0.9999,  # of the parameters, an average that is evaluated and used; 0: none
    )
    return config
