"""Types of the arrays of every model, whatever JAX_ENABLE_X64 says: a run must be readable with and without it."""

import importlib
import json
import os
import pkgutil
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import attnlab.layers
import attnlab.models
from attnlab.configs import LanguageModelConfig, RecurrentConfig, ResNetConfig, TranslatorConfig, VitConfig
from attnlab.configs.run import OptimizerConfig
from attnlab.decode.cache import init_cache, make_decode_step
from attnlab.decode.sampling import sample_tokens
from attnlab.kernels.losses import LossSums
from attnlab.models.language import LanguageModel
from attnlab.models.recurrent import RecurrentSeq2Seq
from attnlab.models.resnet import ResNet
from attnlab.models.transformer import TransformerSeq2Seq
from attnlab.models.vision import VisionTransformer
from attnlab.train import optimizer, run
from attnlab.train.step import Hyperparameters, initial_state, make_update
from tests.tiny import tiny_language_config

TOKENS, IMAGES = jnp.ones((2, 3), jnp.int32), jnp.ones((2, 8, 8, 3), jnp.float32)


BLOCKS = dict(layers=1, width=8, heads=2)


def language(positions='none', **fields):
    return LanguageModel(7, LanguageModelConfig(**BLOCKS, context=16, positions=positions, tied=False, **fields))


def recurrent(cell, attention, **fields):
    config = RecurrentConfig(cell=cell, embedding=4, hidden=6, attention=attention, dropout=0.1, **fields)
    return RecurrentSeq2Seq(7, 7, config)


def vision(**fields):
    return VisionTransformer(5, VitConfig(**BLOCKS, image=(8, 8), **fields))


LANGUAGE = {
    'learned': language('learned'),
    'learned, scan': language('learned', scan=True),
    'sinusoidal': language('sinusoidal', order='post'),
    'relative': language('relative'),
    'alibi': language('alibi'),
    'rms': language('rotary', qk_norm='rms', norm='rms', sinks=True, use_bias=False),
    'l2': language(qk_norm='l2', kv_heads=1),
    'experts': language(experts=2, active=1, shared_expert=True, mlp='swiglu'),
    'convolution': language(mixer='convolution'),
    'gru': language(mixer='gru'),
    'lstm': language(mixer='lstm'),
}
TRANSLATION = {
    'gru': recurrent('gru', 'additive'),
    'lstm': recurrent('lstm', 'dot'),
    'fixed': recurrent('gru', 'none'),
    'original': recurrent('gru', 'additive', original=True),
    'transformer': TransformerSeq2Seq(7, 7, TranslatorConfig(**BLOCKS, context=16)),
}
VISION = {
    'class': vision(pool='class', registers=2),
    'convolution': vision(embedding='convolution', positions='rotary'),
    'tokenizer': vision(embedding='tokenizer', convolutions=1, pool='attention'),
    'resnet': ResNet(5, ResNetConfig(width=4, blocks=1)),
}
MODELS = (
    {f'language, {name}': (model, (TOKENS,)) for name, model in LANGUAGE.items()}
    | {f'translation, {name}': (model, (TOKENS, TOKENS)) for name, model in TRANSLATION.items()}
    | {f'vision, {name}': (model, (IMAGES,)) for name, model in VISION.items()}
)
EACH_LAYER = (
    'language, relative', 'language, rms', 'language, experts', 'language, convolution', 'language, gru',
    'translation, gru', 'translation, transformer', 'vision, class', 'vision, tokenizer', 'vision, resnet',
)  # fmt: skip
"""Models that have every layer of the package together."""

OPTIMIZER = OptimizerConfig(weight_decay=0.1, learning_rate=0.1, schedule='rsqrt')


def trained(model, inputs):
    """The state before and after one step, as shapes."""
    optimize = optimizer.make_optimizer_factory(OPTIMIZER)

    def loss(params, batch, rng):
        output = model.apply({'params': params}, *batch)
        logits = output[0] if isinstance(output, tuple) else output
        return LossSums(jnp.sum(logits), jnp.float32(1.0), {})

    def both():
        init = lambda key: model.init(key, *inputs)['params']
        before = initial_state(init, optimize, 0, ema=0.9, scaled=True)
        update = make_update(loss, optimize, optimizer.make_schedule(OPTIMIZER, 9, 2), ema=0.9)
        given = Hyperparameters(jnp.uint32(0), jnp.float32(0.1), jnp.float32(0.1))
        return before, update(before, inputs, given)[0]

    return jax.eval_shape(both)


@pytest.mark.parametrize('name', MODELS)
def test_with_64_bits_parameters_and_optimizer_have_the_types_that_they_have_without(name):
    with jax.enable_x64(True):
        before, after = trained(*MODELS[name])
    dtypes = {x.dtype.name for x in jax.tree.leaves((before.params, before.ema_params))}
    assert dtypes == {'float32'}
    assert {x.dtype.name for x in jax.tree.leaves(before)} == {'float32', 'int32'}
    assert jax.tree.map(lambda x: x.dtype, before) == jax.tree.map(lambda x: x.dtype, after)


@pytest.mark.parametrize('name', ['learned', 'convolution', 'gru', 'lstm'])
def test_with_64_bits_a_cache_has_the_same_types_after_every_token(name):
    """From its first token on, with no prompt before: the loop's state must not change type."""
    model = LANGUAGE[name]
    with jax.enable_x64(True):
        params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)['params']

        def both(params):
            state = init_cache(model, params, 2, 6)
            sampled = sample_tokens(
                make_decode_step(model, params), state, TOKENS[:, 0], rng=jax.random.key(0), limit=3
            )
            return state, make_decode_step(model, params)(state, TOKENS[:, 0])[0], sampled

        before, after, sampled = jax.eval_shape(both, params)
    assert jax.tree.map(lambda x: x.dtype, before) == jax.tree.map(lambda x: x.dtype, after)
    assert sampled.tokens.dtype == sampled.lengths.dtype == jnp.int32


def test_no_layer_is_missing_from_these_models():
    packages = (attnlab.layers, attnlab.models)
    modules = [importlib.import_module(f'{each.__name__}.{sub.name}') for each in packages
               for sub in pkgutil.iter_modules(each.__path__)]  # fmt: skip
    classes = {x for module in modules for x in vars(module).values()
               if isinstance(x, type) and issubclass(x, nn.Module) and x.__module__ == module.__name__}  # fmt: skip
    met = set()

    def note(call, args, kwargs, context):
        met.add(type(context.module))
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        for name in EACH_LAYER:
            model, inputs = MODELS[name]
            jax.eval_shape(model.init, jax.random.key(0), *inputs)
    # nn.scan and nn.remat make classes of their own.
    missing = {each.__name__ for each in classes} - {base.__name__ for each in met for base in each.__mro__}
    assert missing == {'Past'}  # which has no parameters


@pytest.mark.slow
@pytest.mark.parametrize(('first', 'second'), [('1', '0'), ('0', '1')], ids=['trained with', 'trained without'])
def test_a_run_trained_with_64_bits_is_scored_and_continued_without_and_the_reverse(tmp_path, first, second):
    """Learned positions, a ViT's and a convolution's kernels had 64 bits: 'checkpoint is damaged', exit code 2."""
    tiny_language_config(tmp_path)
    flags = ['model.layers=1', 'model.width=16', 'model.heads=2', 'model.context=16', 'model.mixer=convolution',
             'train.batch_size=4', 'train.duration=6 steps', 'train.eval_every=6 steps', 'train.mesh=data=1',
             'optimizer.warmup=2 steps', f'data.folder={tmp_path}']  # fmt: skip
    train = ['train', '--config=experiments/language/shakespeare_char.py', *(f'--config.{each}' for each in flags)]
    scores = {}
    for x64, command in ((first, train), (second, train), (first, ['eval']), (second, ['eval'])):
        argv = [sys.executable, '-m', 'attnlab', *command, f'--workdir={tmp_path / "run"}']
        done = subprocess.run(argv, env=os.environ | {'JAX_ENABLE_X64': x64}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert 'damaged' not in done.stderr
        if command == ['eval']:
            scores[x64] = json.loads((tmp_path / 'run' / 'scores-valid.json').read_text())
    assert scores['1']['loss'] == pytest.approx(scores['0']['loss'], rel=1e-5)
    assert {x.dtype.name for x in jax.tree.leaves(run.load_run(tmp_path / 'run').params)} == {'float32'}
