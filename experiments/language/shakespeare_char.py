"""Tiny Shakespeare by characters, in nanoGPT's setting for a CPU: 4 layers, D 128, context 64, batch 12, 2,000 steps.

attnlab train --config=experiments/language/shakespeare_char.py --workdir=runs/shakespeare
attnlab train --config=experiments/language/shakespeare_char.py:swiglu --workdir=runs/shakespeare_swiglu
attnlab eval --workdir=runs/shakespeare
attnlab generate --workdir=runs/shakespeare --prompt="ROMEO:" --temperature=0.8
attnlab sweep --config=experiments/language/shakespeare_char.py --sweep=rates,orders --workdir=sweeps/rates --workers=2

Two cores of an AMD EPYC, mean of seeds 0 to 2, validation loss after the last step (nanoGPT's own run: 1.88): 1.758;
'today' 1.666, 'convolution' 1.669, 'rotary' 1.719, 'swiglu' 1.742, 'experts' 1.749; the others in docs/language.md.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict

from attnlab.configs import (
    LanguageConfig,
    LanguageModelConfig,
    OptimizerConfig,
    ShakespeareData,
    TrainConfig,
    config_dict,
)
from attnlab.sweeps import Overrides, chained, grid, zipped

TODAY = dict(positions='rotary', qk_norm='rms', norm='rms', mlp='swiglu')
VARIANTS = {
    '': {},
    'post': dict(order='post'),
    'sandwich': dict(order='sandwich'),
    'parallel': dict(parallel=True),
    'qk_norm': dict(qk_norm='rms'),
    'rms': dict(norm='rms'),
    'swiglu': dict(mlp='swiglu'),
    'rotary': dict(positions='rotary'),
    'alibi': dict(positions='alibi'),
    'grouped': dict(kv_heads=1),
    'sinks': dict(sinks=True),
    'experts': dict(experts=4, experts_per_token=1),
    'today': TODAY,
    'convolution': dict(mixer='convolution'),
    'gru': dict(mixer='gru'),
}


def get_config(arg: str = '') -> ConfigDict:
    """arg: '' for GPT-2's block, or the one thing that is different from it; 'today' for several at once."""
    if arg not in VARIANTS:
        raise ValueError(f'the argument is {arg!r}; expected one of {", ".join(map(repr, VARIANTS))}')
    return config_dict(
        LanguageConfig(
            data=ShakespeareData(
                vocabulary='characters',
            ),
            model=LanguageModelConfig(use_bias=False, **VARIANTS[arg]),
            optimizer=OptimizerConfig(
                b2=0.99,
                learning_rate=4e-3,
                schedule='linear',
                warmup='100 steps',
                clip=1.0,
                weight_decay=0.1,
            ),
            train=TrainConfig(
                batch_size=12,
                duration='2000 steps',
                log_every='100 steps',
                eval_every='500 steps',
                save_every='500 steps',
                label_smoothing=0.0,
            ),
        )
    )


def sweep_rates() -> Iterator[Overrides]:
    """Those of Wortsman et al. 2023, for how much a variant depends on it: --sweep=rates,orders."""
    return grid({'optimizer.learning_rate': (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)})


def sweep_orders() -> Iterator[Overrides]:
    """Pre-norm, post-norm, and pre-norm with queries and keys normalised."""
    return zipped({'model.order': ('pre', 'post', 'pre'), 'model.qk_norm': ('none', 'none', 'rms')})


def sweep_heads() -> Iterator[Overrides]:
    """One wide head to many narrow ones, of as many parameters."""
    return grid({'model.heads': (1, 2, 4, 8, 16)})


def sweep_sizes() -> Iterator[Overrides]:
    """Depth and width."""
    return grid({'model.layers': (1, 2, 4, 8), 'model.width': (64, 128, 256)})


def sweep_experts() -> Iterator[Overrides]:
    """One MLP, and experts of which a token meets one or two."""
    return chained(grid({'model.experts': (0,)}), grid({'model.experts': (4, 8), 'model.experts_per_token': (1, 2)}))


def sweep_seeds() -> Iterator[Overrides]:
    """Three, to go with any of the others: --sweep=heads,seeds."""
    return grid({'seed': range(3)})
