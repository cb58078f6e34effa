"""Costs of models from their shapes: published parameter counts, and hand-computed operations."""

import re
import resource
import time
from pathlib import Path

import pytest

from attnlab import cli, configs, tasks
from attnlab.train import count
from attnlab.train.cost import saved_bytes, tree_size
from tests.tiny import LINES, tiny_language_config

LANGUAGE, ALIGN = 'experiments/language', 'experiments/align'
VISION = 'experiments/vision/imagenet_b16.py'
SHAKESPEARE, GPT3 = f'{LANGUAGE}/shakespeare_char.py', f'{LANGUAGE}/gpt3_175b.py'
PUBLISHED = {
    f'{LANGUAGE}/gpt2_small.py': 124_439_808,  # the weights of Radford et al. 2019
    f'{LANGUAGE}/gpt3_175b.py': 174_604_259_328,  # by the sizes in table 2.1 of Brown et al. 2020
    f'{LANGUAGE}/llama_7b.py': 6_738_415_616,  # the weights of Touvron et al. 2023
    f'{LANGUAGE}/mixtral_8x7b.py': 46_702_792_704,  # the weights of Jiang et al. 2024
    f'{ALIGN}/transformer_base.py': 63_082_496,  # 65 million in table 3 of Vaswani et al. 2017
    f'{ALIGN}/transformer_big.py': 214_245_376,  # 213 million there
    f'{ALIGN}/rnnsearch.py': 80_401_000,  # by the equations in appendix A of Bahdanau et al. 2015
    f'{ALIGN}/rnnsearch.py:fixed': 68_540_000,
    VISION: 86_567_656,  # ViT-B/16; this and the others by the sizes in the papers, with a class token
    f'{VISION}:Ti/16': 5_717_416,
    f'{VISION}:S/16': 22_050_664,
    f'{VISION}:L/16': 304_326_632,
    f'{VISION}:H/14': 632_045_800,
}


@pytest.fixture(scope='module')
def rows(tmp_path_factory):
    """Return a function (experiment) -> its costs by name, which counts each experiment once."""
    folder, costs = tmp_path_factory.mktemp('text'), {}
    (folder / 'input.txt').write_text('\n'.join(LINES))

    def count_experiment(experiment):
        if experiment not in costs:
            overrides = [('data.folder', str(folder)), ('model.layers', '2')] if 'shakespeare' in experiment else []
            overrides += [('model.experts_per_token', '2')] if 'experts' in experiment else []
            start = time.monotonic()
            config = configs.load_experiment(experiment, overrides)
            costs[experiment] = {row.name: row for row in count.count_costs(config)[1]}
            assert time.monotonic() - start < 60
        return costs[experiment]

    return count_experiment


def parameters(experiment, layers=None, **changes):
    config = configs.load_experiment(
        experiment, [(key.replace('__', '.'), str(value)) for key, value in changes.items()]
    )
    return tree_size(tasks.create_task(config).outline(layers, False).params)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('experiment', PUBLISHED)
def test_parameter_counts_of_published_models(experiment):
    assert parameters(experiment) == PUBLISHED[experiment]
    assert f'{PUBLISHED[experiment]:,}' in Path(experiment.split(':')[0]).read_text()


def test_every_experiment_that_names_its_parameter_count_is_tested():
    first_lines = {str(path): path.read_text().split('\n')[0] for path in Path('experiments').rglob('*.py')}
    named = {path for path, line in first_lines.items() if re.search('[0-9] parameters', line)}
    assert named == {experiment.split(':')[0] for experiment in PUBLISHED}


@pytest.mark.slow
def test_layers_and_rest_sum_to_the_whole(rows):
    for experiment, layers in ((GPT3, 96), (SHAKESPEARE, 2), (f'{SHAKESPEARE}:experts', 2)):
        costs = rows(experiment)
        assert len(costs) >= 8
        for row in costs.values():
            assert row.layer * layers + row.rest == pytest.approx(row.whole, rel=1e-12), row.name


@pytest.mark.slow
def test_costs_of_gpt3_match_hand_computed_values(rows):
    costs = rows(GPT3)  # the parameters alone would be 650 GiB
    D, L, V, T = 12288, 96, 50257, 2048
    forward = 2 * T * (12 * D * D) + 4 * T * T * D
    assert costs['FLOP, forward'].layer == forward and costs['FLOP, forward'].rest == 2 * T * D * V
    # In the backward pass, full remat computes all products of a block again but the last.
    assert costs['FLOP, forward and backward'].layer == 4 * forward - 2 * T * 4 * D * D
    assert costs['parameters'].whole - costs['  without embeddings'].whole == (V + T) * D
    assert costs['key-value cache'].whole == L * 2 * T * D * 2  # bfloat16
    assert costs['activations'].layer == T * D * 2  # the input of the layer


# XLA also counts elementwise operations, such as 2 T^2 for each head in a softmax, so its estimate is never below the
# products.  Their share is larger in narrower models: a GPT-3 layer has 12 D^2 products for each token, 12 D for each
# of its D elements.
@pytest.mark.parametrize(('experiment', 'excess'), [(GPT3, 0.05), (SHAKESPEARE, 0.1)])
def test_xla_estimate_is_slightly_larger(rows, experiment, excess):
    costs = rows(experiment)
    for name in ('forward', 'forward and backward'):
        products, estimate = costs[f'FLOP, {name}'], costs[f'  XLA estimate, {name}']
        assert products.layer <= estimate.layer <= (1 + excess) * products.layer
        assert products.whole <= estimate.whole <= (1 + excess) * products.whole
        assert products.rest <= estimate.rest


@pytest.mark.slow
def test_experts_count_all_parameters_and_only_active_flops(rows):
    dense, experts = rows(SHAKESPEARE), rows(f'{SHAKESPEARE}:experts')
    D, E, A, T = 128, 4, 2, 64
    mlp, router = 2 * D * 4 * D, D * E
    difference = {name: experts[name].layer - dense[name].layer for name in dense}
    assert difference['parameters'] == (E - 1) * mlp + router
    assert experts['  active per token'].layer - dense['parameters'].layer == (A - 1) * mlp + router
    assert difference['FLOP, forward'] == 2 * T * ((A - 1) * mlp + router)
    assert difference['FLOP, forward and backward'] == 3 * difference['FLOP, forward']
    assert experts['parameters'].rest == dense['parameters'].rest
    assert difference['key-value cache'] == 0


def test_active_parameters_of_mixtral():
    experiment, D, F, L = f'{LANGUAGE}/mixtral_8x7b.py', 4096, 14336, 32
    config = configs.load_experiment(experiment)
    params = tasks.create_task(config).outline(None, False).params
    assert count._weighted_size(params, 'expert', 2 / 8) == 12_879_925_248
    assert parameters(experiment, 2) - parameters(experiment, 1) == 8 * 3 * D * F + 8 * D + 2 * D * D * 5 // 4 + 2 * D
    assert count._weighted_size(params, 'expert', 0) == 46_702_792_704 - L * 8 * 3 * D * F


def test_swiglu_has_about_as_many_parameters_as_gelu(tmp_path):
    (tmp_path / 'input.txt').write_text('\n'.join(LINES))
    gelu, swiglu = (parameters(name, data__folder=tmp_path) for name in (SHAKESPEARE, f'{SHAKESPEARE}:swiglu'))
    assert gelu != swiglu == pytest.approx(gelu, rel=0.01)


def test_recurrent_model_has_no_cost_per_layer(rows):
    costs = rows(f'{ALIGN}/grammar_gru.py')
    assert {row.layer for row in costs.values()} == {row.rest for row in costs.values()} == {None}
    assert (
        costs['parameters'].whole - costs['  without embeddings'].whole == 2 * 2000 * 64
        and 'key-value cache' not in costs
    )


@pytest.mark.slow
def test_activations_of_translation_grow_linearly_with_length():
    """A Transformer in training saves no attention weights, whose size would grow quadratically."""
    activations = []
    for T in (256, 512, 1024):
        overrides = [('data.widths', f'{T}'), ('model.context', '2048'), ('model.implementation', 'blockwise')]
        config = configs.load_experiment(f'{ALIGN}/transformer_base.py', overrides)
        outline = tasks.create_task(config).outline(1, False)
        activations.append(saved_bytes(outline.forward, outline.params, *outline.batch))
    assert activations[2] - activations[1] == pytest.approx(2 * (activations[1] - activations[0]), rel=0.01)


def test_count_command_prints_the_table(monkeypatch, capsys):
    rows = [
        count.CostRow('parameters', 1000.0, 23.0, 4023.0, ''),
        count.CostRow('activations', None, None, 3 * 2.0**30, 'B'),
    ]
    monkeypatch.setattr(count, 'count_costs', lambda config: ('8 tokens', rows))
    assert cli.main(['count', f'--config={SHAKESPEARE}']) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.startswith('one row: 8 tokens') and header.split()[-5:] == ['each', 'layer', 'the', 'rest', 'all']
    assert [line.split() for line in lines] == [
        ['parameters', '1,000', '23', '4,023'], ['activations', '3.0', 'GiB']
    ]  # fmt: skip
    assert {len(line) for line in lines} == {len(header)}


@pytest.mark.parametrize(('override', 'message'), [
    ('model.laysers=3', 'there is no config.model.laysers; did you mean config.model.layers?'),
    ('model.heads=7', 'model: queries have width 768; expected a multiple of 7 heads, or head_width'),
    ('model.width=0', 'model.width is 0; expected 1 or more'),
    ('model.experts=2 model.experts_per_token=3',
     'model: experts_per_token is 3; expected 1 to 2, the number of experts'),
    ('model.context=2147483648', 'model.context is 2147483648; expected 1 <= context < 2147483648'),
    ('data.vocabulary=characters data.vocabulary_size=0', 'data.path is empty; expected a path: --config.data.path='),
    ('task=languages', "task is 'languages'; expected 'align', 'language' or 'vision'"),
])  # fmt: skip
def test_count_command_refuses_invalid_config_in_one_line(capsys, as_used, override, message):
    overrides = [f'--config.{change}' for change in override.split()]
    assert cli.main(['count', f'--config={LANGUAGE}/gpt2_small.py', *overrides]) == 2
    out, error = capsys.readouterr()
    assert out == '' and error.startswith(f'attnlab: {message}') and error.count('\n') == 1


@pytest.mark.slow
@pytest.mark.parametrize('positions', ['learned', 'rotary'])
def test_context_too_long_for_any_memory_is_counted(tmp_path, positions):
    """The matrix of all pairs has 2^63 elements or more: the estimate of XLA is left empty."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config = tiny_language_config(tmp_path, model__heads=4, model__context=2 * 10**9, model__positions=positions)
    costs = {row.name.strip(): row.whole for row in count.count_costs(config)[1]}
    assert costs['XLA estimate, forward'] is None and costs['FLOP, forward'] > 10**20
    assert (costs['parameters'] > 16 * 2 * 10**9) == (positions == 'learned')
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # kilobytes: 1 GiB
