"""The rules for parameters, checked with the models of all experiments."""

import re

import jax
import pytest

from attnlab import configs, parameters, tasks
from attnlab.train import checksum, optimizer, sharding
from tests.experiments import EXPERIMENTS
from tests.tiny import LINES

CHAR, SMALL = 'experiments/language/shakespeare_char.py', 'experiments/vision/cifar10_small.py'
MODELS = [(spec, {}) for spec in EXPERIMENTS] + [
    ('experiments/align/grammar_gru.py', {'model.cell': 'lstm', 'model.encoder_layers': '2'}),
    ('experiments/align/rnnsearch.py:fixed', {}),
    ('experiments/align/grammar_transformer.py', {'model.positions': 'relative'}),
    (f'{CHAR}:today', {'model.tied': 'false', 'model.use_bias': 'true', 'model.qk_norm': 'l2'}),
    (f'{CHAR}:today',
     {'model.scan': 'true', 'model.qk_norm': 'l2', 'model.experts': '2', 'model.experts_per_token': '1'}),
    (f'{CHAR}:gru', {}),
    (f'{CHAR}:convolution', {'model.use_bias': 'true'}),
    (f'{CHAR}:experts', {'model.shared_expert': 'true', 'model.use_bias': 'true', 'model.sinks': 'true'}),
    (f'{CHAR}:grouped', {'model.positions': 'relative'}),
    (f'{SMALL}:vit', {'model.pool': 'class', 'model.registers': '2', 'model.qk_norm': 'rms'}),
    (f'{SMALL}:resnet', {}),
    ('experiments/vision/imagenet_b16.py', {'model.embedding': 'convolution', 'model.pool': 'attention'}),
]
REQUIRED_FIELDS = {'files_gru': ('train', 'valid', 'test'), 'shakespeare_char': ('folder',)}
"""Fields of `data` that name a file or a folder of the user."""


@pytest.fixture(scope='module')
def models(tmp_path_factory):
    """Return, for each model, (shape, weight decay) of each parameter by its path."""
    folder = tmp_path_factory.mktemp('data')
    (folder / 'input.txt').write_text('\n'.join(LINES))
    models = {}
    for spec, changes in MODELS:
        fields = next((fields for name, fields in REQUIRED_FIELDS.items() if name in spec), ())
        config = configs.load_experiment(spec, [*changes.items(), *((f'data.{name}', str(folder)) for name in fields)])
        params = tasks.create_task(config).outline(None, False).params
        leaves = jax.tree_util.tree_flatten_with_path(params)[0]
        decays = jax.tree.leaves(optimizer.weight_decay_mask(params))
        models[spec, *changes.items()] = {
            checksum.path_string(keys): (leaf.shape, decay) for (keys, leaf), decay in zip(leaves, decays, strict=True)
        }
    return models


@pytest.mark.slow
def test_each_parameter_matches_one_rule_and_each_rule_is_used(models):
    *rules, vector_rule = parameters.PARAMETER_RULES
    used = set()
    for path in {path for model in models.values() for path in model}:
        matching = [rule for rule in rules if re.fullmatch(f'(.*/)?({rule.pattern})', path)]
        assert len(matching) <= 1, path
        assert parameters.find_rule(path) == (matching or [vector_rule])[0], path
        used.add(parameters.find_rule(path))
    assert used == set(parameters.PARAMETER_RULES)


def test_every_matrix_is_decayed_and_sharded(models):
    for model in models.values():
        for path, (shape, decay) in model.items():
            assert decay == path.endswith(('kernel', 'embedding', 'table', 'attend/vector')), path
            assert decay == (len(shape) - parameters.is_stacked(path) > 1 and not path.endswith('bias')), path
            divisible_shape = tuple(8 * size for size in shape)
            spec = sharding.parameter_spec(path, divisible_shape, {'fsdp': 2, 'tensor': 2, 'expert': 2})
            if path.endswith(('kernel', 'embedding', 'table')) and 'relative_bias' not in path:
                assert 'fsdp' in spec, path


def test_parameter_without_a_rule_is_decayed_if_it_is_a_matrix():
    assert [parameters.is_decayed('mine/weights', ndim) for ndim in (0, 1, 2, 3)] == [False, False, True, True]
    assert not parameters.is_decayed('blocks/mine/weights', 2)  # vectors that a scan stacks


def test_find_block_of_a_parameter():
    paths = ('stack/block_3/mlp/up/kernel', 'stage_1_block_0_first/kernel', 'stack/blocks/mlp/up/kernel', 'head/bias')
    assert [parameters.find_block(path) for path in paths] == [(0, 3), (1, 0), None, None]
    assert [parameters.is_stacked(path) for path in paths] == [False, False, True, False]
    assert parameters.is_after_blocks('head/bias') and not parameters.is_after_blocks('embedding/embedding')
