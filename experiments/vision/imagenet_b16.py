"""The models of Dosovitskiy et al. 2021 and Touvron et al. 2021, to count: ViT-B/16 has 86,567,656 parameters.

attnlab count --config=experiments/vision/imagenet_b16.py
attnlab count --config=experiments/vision/imagenet_b16.py:L/16
attnlab train --config=experiments/vision/imagenet_b16.py --workdir=runs/imagenet \
    --config.data.train=train.npz --config.data.test=test.npz

Ti/16 has 5,717,416, S/16 22,050,664, L/16 304,326,632 and H/14 632,045,800, for 224 x 224 pixels, 1,000 classes and a
class token.
"""

from ml_collections import ConfigDict

from attnlab.configs import VIT_SIZES, ImageFiles, OptimizerConfig, TrainConfig, VisionConfig, VitConfig, config_dict

SIZES = {'Ti/16': 16, 'S/16': 16, 'B/16': 16, 'L/16': 16, 'H/14': 14}


def get_config(arg: str = '') -> ConfigDict:
    """Return the config.  arg: model size and patch size, as 'L/16'; '' for B/16."""
    arg = arg or 'B/16'
    if arg not in SIZES:
        raise ValueError(f'the argument is {arg!r}; expected one of {", ".join(map(repr, SIZES))}')
    return config_dict(
        VisionConfig(
            data=ImageFiles(
                crop=16,
                flip=True,
                policy='rand',
                strength=0.9,
                erase=0.25,
                mixup=0.8,
                cutmix=1.0,
            ),
            model=VitConfig(
                **VIT_SIZES[arg.split('/')[0]],
                image=(224, 224),
                patch=(SIZES[arg], SIZES[arg]),
                pool='class',
                dtype='bfloat16',
                scan=True,
            ),
            optimizer=OptimizerConfig(
                b2=0.999,
                learning_rate=1e-3,
                schedule='cosine',
                warmup='5 epochs',
                clip=1.0,
                weight_decay=0.05,
            ),
            train=TrainConfig(
                batch_size=1024,
                duration='300 epochs',
                log_every='100 steps',
                eval_every='5 epochs',
                save_every='5 epochs',
                label_smoothing=0.1,
                ema=0.9999,
            ),
        )
    )
