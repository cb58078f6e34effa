"""The language model benchmark, at tiny sizes."""

import importlib
import sys
from collections import Counter
from math import prod

import jax
import numpy as np
import pytest

from attnlab.bench import lm, steps
from attnlab.errors import RunError, UserError
from tests.bench.products import matrix_products

TINY = lm.LanguageModelSizes(vocabulary=13, width=8, layers=2, heads=2, context=20, batch=3)


@pytest.mark.slow
def test_labels_are_the_next_inputs():
    _, _, (inputs, labels) = lm.create_language_model(TINY)
    assert inputs.shape == labels.shape == (3, 20) and 0 <= inputs.min() and inputs.max() < 13
    np.testing.assert_array_equal(inputs[:, 1:], labels[:, :-1])


@pytest.mark.slow
def test_a_step_trains_and_does_not_change_the_given_parameters():
    model, params, arrays = lm.create_language_model(TINY)
    first, second = (steps.attnlab_training_step(steps.model_loss(model), params, arrays) for _ in range(2))
    losses = [first() for _ in range(4)]
    assert losses == sorted(losses, reverse=True) and losses[0] == pytest.approx(np.log(13), rel=0.05)
    assert second() == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.slow
def test_decoding_gives_the_tokens_of_decoding_without_a_cache():
    model, params, _ = lm.create_language_model(TINY)
    rows = prompt = np.random.default_rng(1).integers(0, 13, (2, 4)).astype(np.int32)
    apply = jax.jit(model.apply)
    while rows.shape[1] < 20:
        logits, _ = apply({'params': params}, np.pad(rows, ((0, 0), (0, 20 - rows.shape[1]))))
        rows = np.concatenate([rows, np.argmax(logits[:, rows.shape[1] - 1], axis=-1)[:, None]], axis=1)
    np.testing.assert_array_equal(lm.greedy_decoder(model, params, prompt, 16)(), rows[:, 4:])


def test_different_tokens_are_an_error():
    one, other = np.zeros((2, 5), int), np.zeros((2, 5), int)
    lm.check_same_tokens({'one': one, 'other': other})
    other[0, 4] = other[1, 2] = 1
    with pytest.raises(RunError, match='one and other differ in row 1 from token 2 on'):
        lm.check_same_tokens({'one': one, 'other': other})


@pytest.mark.slow
def test_product_shapes_are_those_of_the_program():
    """Products of forward and backward, in the form of `matrix_products`."""
    model, params, arrays = lm.create_language_model(TINY)
    loss = lambda params, arrays: steps.model_loss(model)(params, arrays, jax.random.key(0)).total
    traced = Counter()
    for equation in jax.make_jaxpr(jax.grad(loss))(params, arrays).eqns:
        assert equation.primitive.name != 'scan'
        traced.update(matrix_products(equation))
    expected = Counter()
    for left, right in lm.lm_product_shapes(TINY):
        batch, M, K, N = prod(left[:-2]), *left[-2:], right[-1]
        expected.update([(batch, K, *sorted((M, N))), (batch, N, *sorted((M, K))), (batch, M, *sorted((K, N)))])
    assert traced == expected


def test_the_compiler_keeps_every_product():
    model, params, arrays = lm.create_language_model(TINY)
    operands = steps.product_operands(lm.lm_product_shapes(TINY))
    program = jax.jit(steps.run_products).lower(operands).compile().as_text()
    assert program is not None and program.count(' dot(') == 3 * len(operands)


@pytest.mark.slow
def test_the_profile_has_times_and_shares(capsys):
    model, params, arrays = lm.create_language_model(TINY)
    steps.print_profile(steps.model_loss(model), params, arrays, lm.lm_product_shapes(TINY), rounds=3, seconds=1.0)
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[-2:] == ['ms', 'share']
    names = ['whole step', 'optimizer', 'forward', 'forward and backward', 'products']
    assert [row[:24].strip() for row in rows[:5]] == names
    times = {row[:24].strip(): float(row[24:34]) for row in rows}
    shares = {row[:24].strip(): row[34:42].strip() for row in rows}
    assert shares['whole step'] == '100%' and rows[4].endswith('GF/s')
    both = times['forward and backward']
    assert times['backward'] == pytest.approx(both - times['forward'], abs=0.2)
    assert times['without the products'] == pytest.approx(both - times['products'], abs=0.2)


def test_the_error_without_pytorch_has_the_install_command(monkeypatch):
    monkeypatch.delitem(sys.modules, 'attnlab.bench.lm_torch', raising=False)
    monkeypatch.setitem(sys.modules, 'torch', None)
    with pytest.raises(UserError, match='pip install'):
        importlib.import_module('attnlab.bench.lm_torch')


@pytest.mark.peers
def test_the_table_has_all_frameworks(monkeypatch, capsys):
    from attnlab.bench import lm_torch as peer

    monkeypatch.setattr(peer.torch, 'compile', lambda function: function)  # compiling takes a minute without a cache
    lm.measure_language_model([TINY], rounds=2, seconds=1.0)
    machine, threads, _, sizes, head, *rows = capsys.readouterr().out.splitlines()
    assert 'torch' in machine and 'PyTorch on' in threads
    assert 'vocabulary 13, width 8' in sizes and all(framework in head for framework in steps.FRAMEWORKS)
    assert [row[:18].strip() for row in rows[:3]] == ['training', 'decoding, batch 1', 'decoding, batch 8']
    for row in rows[1:3]:
        ours, theirs, compiled, ratio, compiled_ratio = row[18:].replace(',', '').split()
        assert float(ours) / float(theirs) == pytest.approx(float(ratio), rel=0.1, abs=0.01)
        assert compiled == compiled_ratio == '-'


@pytest.mark.peers
@pytest.mark.filterwarnings('ignore::DeprecationWarning')  # PyTorch itself, during compilation
def test_all_frameworks_have_the_same_losses():
    small = TINY._replace(layers=1)
    functions, missing = lm.lm_training_steps(small, *lm.create_language_model(small))
    assert len(functions) + len(missing) == 3
    ours, *others = ([step() for _ in range(4)] for step in functions.values())
    for theirs in others:
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.peers
def test_the_reason_is_printed_if_torch_compile_fails(monkeypatch, capsys):
    from attnlab.bench import lm_torch as peer

    def failing_compile(function):
        def call(*args):
            raise RuntimeError('no C++ compiler\nand a long story')

        return call

    monkeypatch.setattr(peer.torch, 'compile', failing_compile)
    lm.measure_language_model([TINY], rounds=2, seconds=1.0)
    lines = capsys.readouterr().out.splitlines()
    assert '-: torch.compile failed: no C++ compiler' in lines and 'story' not in ''.join(lines)
    (row,) = (line for line in lines if line.startswith('training'))
    assert row.split().count('-') == 2


@pytest.mark.peers
def test_it_is_not_timed_unless_both_compute_the_same():
    from attnlab.bench import lm_torch as peer

    model, params, arrays = lm.create_language_model(TINY)
    other = lambda: peer.LanguageModel(*TINY[:3], TINY.context, TINY.heads)
    with pytest.raises(RunError, match='the same weights and batch give the loss'):
        steps.training_steps(steps.model_loss(model), params, arrays, other, peer.loss, peer.to_tensors(arrays))
