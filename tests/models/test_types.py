"""Dtypes of all arrays of every model with and without JAX_ENABLE_X64: a run must be readable with both."""

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


def language_model(positions='none', **fields):
    return LanguageModel(7, LanguageModelConfig(**BLOCKS, context=16, positions=positions, tied=False, **fields))


def recurrent_model(cell, attention, **fields):
    config = RecurrentConfig(cell=cell, embedding=4, hidden=6, attention=attention, dropout=0.1, **fields)
    return RecurrentSeq2Seq(7, 7, config)


def vision_model(**fields):
    return VisionTransformer(5, VitConfig(**BLOCKS, image=(8, 8), **fields))


LANGUAGE = {
    'learned': language_model('learned'),
    'learned, scan': language_model('learned', scan=True),
    'sinusoidal': language_model('sinusoidal', order='post'),
    'relative': language_model('relative'),
    'alibi': language_model('alibi'),
    'rms': language_model('rotary', qk_norm='rms', norm='rms', sinks=True, use_bias=False),
    'l2': language_model(qk_norm='l2', kv_heads=1),
    'experts': language_model(experts=2, experts_per_token=1, shared_expert=True, mlp='swiglu'),
    'convolution': language_model(mixer='convolution'),
    'gru': language_model(mixer='gru'),
    'lstm': language_model(mixer='lstm'),
}
TRANSLATION = {
    'gru': recurrent_model('gru', 'additive'),
    'lstm': recurrent_model('lstm', 'dot'),
    'fixed': recurrent_model('gru', 'none'),
    'original': recurrent_model('gru', 'additive', original=True),
    'transformer': TransformerSeq2Seq(7, 7, TranslatorConfig(**BLOCKS, context=16)),
}
VISION = {
    'class': vision_model(pool='class', registers=2),
    'convolution': vision_model(embedding='convolution', positions='rotary'),
    'tokenizer': vision_model(embedding='tokenizer', convolutions=1, pool='attention'),
    'resnet': ResNet(5, ResNetConfig(width=4, blocks=1)),
}
MODELS = (
    {f'language, {name}': (model, (TOKENS,)) for name, model in LANGUAGE.items()}
    | {f'translation, {name}': (model, (TOKENS, TOKENS)) for name, model in TRANSLATION.items()}
    | {f'vision, {name}': (model, (IMAGES,)) for name, model in VISION.items()}
)
COVERING_MODELS = (
    'language, relative', 'language, rms', 'language, experts', 'language, convolution', 'language, gru',
    'translation, gru', 'translation, transformer', 'vision, class', 'vision, tokenizer', 'vision, resnet',
)  # fmt: skip
"""Models that together contain every layer of the package."""

OPTIMIZER = OptimizerConfig(weight_decay=0.1, learning_rate=0.1, schedule='rsqrt')


def states_around_one_step(model, inputs):
    """Return the shapes and dtypes of the training state before and after one step."""
    optimize = optimizer.make_optimizer_factory(OPTIMIZER)

    def loss(params, batch, rng):
        output = model.apply({'params': params}, *batch)
        logits = output[0] if isinstance(output, tuple) else output
        return LossSums(jnp.sum(logits), jnp.float32(1.0), {})

    def train_one_step():
        init = lambda key: model.init(key, *inputs)['params']
        before = initial_state(init, optimize, 0, ema=0.9, scaled=True)
        update = make_update(loss, optimize, optimizer.make_schedule(OPTIMIZER, 9, 2), ema=0.9)
        hyperparameters = Hyperparameters(jnp.uint32(0), jnp.float32(0.1), jnp.float32(0.1))
        return before, update(before, inputs, hyperparameters)[0]

    return jax.eval_shape(train_one_step)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('name', MODELS)
def test_x64_does_not_change_the_dtypes_of_parameters_and_optimizer_state(name):
    with jax.enable_x64(True):
        before, after = states_around_one_step(*MODELS[name])
    dtypes = {x.dtype.name for x in jax.tree.leaves((before.params, before.ema_params))}
    assert dtypes == {'float32'}
    assert {x.dtype.name for x in jax.tree.leaves(before)} == {'float32', 'int32'}
    assert jax.tree.map(lambda x: x.dtype, before) == jax.tree.map(lambda x: x.dtype, after)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize('name', ['learned', 'convolution', 'gru', 'lstm'])
def test_with_x64_a_decoding_step_keeps_the_dtypes_of_the_cache(name):
    """Also for the first token, without a prompt: the carry of the loop must not change its dtypes."""
    model = LANGUAGE[name]
    with jax.enable_x64(True):
        params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)['params']

        def decode(params):
            state = init_cache(model, params, 2, 6)
            sampled = sample_tokens(
                make_decode_step(model, params), state, TOKENS[:, 0], rng=jax.random.key(0), max_tokens=3
            )
            return state, make_decode_step(model, params)(state, TOKENS[:, 0])[0], sampled

        before, after, sampled = jax.eval_shape(decode, params)
    assert jax.tree.map(lambda x: x.dtype, before) == jax.tree.map(lambda x: x.dtype, after)
    assert sampled.tokens.dtype == sampled.lengths.dtype == jnp.int32


@pytest.mark.slow
def test_the_covering_models_contain_every_layer():
    packages = (attnlab.layers, attnlab.models)
    modules = [importlib.import_module(f'{package.__name__}.{submodule.name}') for package in packages
               for submodule in pkgutil.iter_modules(package.__path__)]  # fmt: skip
    classes = {x for module in modules for x in vars(module).values()
               if isinstance(x, type) and issubclass(x, nn.Module) and x.__module__ == module.__name__}  # fmt: skip
    called = set()

    def record(call, args, kwargs, context):
        called.add(type(context.module))
        return call(*args, **kwargs)

    with nn.intercept_methods(record):
        for name in COVERING_MODELS:
            model, inputs = MODELS[name]
            jax.eval_shape(model.init, jax.random.key(0), *inputs)
    # nn.scan and nn.remat make subclasses.
    missing = {cls.__name__ for cls in classes} - {base.__name__ for cls in called for base in cls.__mro__}
    assert missing == {'CachePositions'}  # it has no parameters


@pytest.mark.slow
@pytest.mark.parametrize(('first', 'second'), [('1', '0'), ('0', '1')], ids=['trained with', 'trained without'])
def test_a_run_trained_with_x64_is_scored_and_continued_without_and_the_reverse(tmp_path, first, second):
    """Learned positions and the kernels of a ViT and a convolution once had 64 bits, which made evaluation report a
    damaged checkpoint with exit code 2."""
    tiny_language_config(tmp_path)
    flags = ['model.layers=1', 'model.width=16', 'model.heads=2', 'model.context=16', 'model.mixer=convolution',
             'train.batch_size=4', 'train.duration=6 steps', 'train.eval_every=6 steps', 'train.mesh=data=1',
             'optimizer.warmup=2 steps', f'data.folder={tmp_path}']  # fmt: skip
    train = ['train', '--config=experiments/language/shakespeare_char.py', *(f'--config.{flag}' for flag in flags)]
    scores = {}
    for x64, command in ((first, train), (second, train), (first, ['eval']), (second, ['eval'])):
        argv = [sys.executable, '-m', 'attnlab', *command, f'--workdir={tmp_path / "run"}']
        process = subprocess.run(argv, env=os.environ | {'JAX_ENABLE_X64': x64}, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        assert 'damaged' not in process.stderr
        if command == ['eval']:
            scores[x64] = json.loads((tmp_path / 'run' / 'scores-valid.json').read_text())
    assert scores['1']['loss'] == pytest.approx(scores['0']['loss'], rel=1e-5)
    assert {x.dtype.name for x in jax.tree.leaves(run.load_run(tmp_path / 'run').params)} == {'float32'}
