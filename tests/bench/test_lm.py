"""The bench of the language model, at sizes that take no time."""

import importlib
import sys
from collections import Counter
from math import prod

import jax
import numpy as np
import pytest

from attnlab.bench import lm, steps
from attnlab.errors import RunError, UserError
from tests.bench.products import multiplied

TINY = lm.LanguageModelSizes(vocabulary=13, width=8, layers=2, heads=2, context=20, batch=3)


def test_labels_are_the_inputs_one_later():
    _, _, (inputs, labels) = lm.create_language_model(TINY)
    assert inputs.shape == labels.shape == (3, 20) and 0 <= inputs.min() and inputs.max() < 13
    np.testing.assert_array_equal(inputs[:, 1:], labels[:, :-1])


def test_a_step_trains_and_leaves_the_parameters_to_others():
    model, params, arrays = lm.create_language_model(TINY)
    one, other = (steps.attnlab_training_step(steps.model_loss(model), params, arrays) for _ in range(2))
    losses = [one() for _ in range(4)]
    assert losses == sorted(losses, reverse=True) and losses[0] == pytest.approx(np.log(13), rel=0.05)
    assert other() == pytest.approx(losses[0], rel=1e-6)


def test_decoding_says_what_no_cache_says():
    model, params, _ = lm.create_language_model(TINY)
    rows = prompt = np.random.default_rng(1).integers(0, 13, (2, 4)).astype(np.int32)
    apply = jax.jit(model.apply)
    while rows.shape[1] < 20:
        logits, _ = apply({'params': params}, np.pad(rows, ((0, 0), (0, 20 - rows.shape[1]))))
        rows = np.concatenate([rows, np.argmax(logits[:, rows.shape[1] - 1], axis=-1)[:, None]], axis=1)
    np.testing.assert_array_equal(lm.greedy_decoder(model, params, prompt, 16)(), rows[:, 4:])


def test_other_tokens_are_not_timed():
    one, other = np.zeros((2, 5), int), np.zeros((2, 5), int)
    lm.check_same_tokens({'one': one, 'other': other})
    other[0, 4] = other[1, 2] = 1
    with pytest.raises(RunError, match='one and other part in row 1 at token 2'):
        lm.check_same_tokens({'one': one, 'other': other})


def test_the_products_are_those_of_the_program():
    """Each as (batch, inner size, the two outer ones in either order), forward and backward."""
    model, params, arrays = lm.create_language_model(TINY)
    loss = lambda params, arrays: steps.model_loss(model)(params, arrays, jax.random.key(0)).total
    found = Counter()
    for equation in jax.make_jaxpr(jax.grad(loss))(params, arrays).eqns:
        assert equation.primitive.name != 'scan'
        found.update(multiplied(equation))
    expected = Counter()
    for left, right in lm.lm_product_shapes(TINY):
        batch, M, K, N = prod(left[:-2]), *left[-2:], right[-1]
        expected.update([(batch, K, *sorted((M, N))), (batch, N, *sorted((M, K))), (batch, M, *sorted((K, N)))])
    assert found == expected


def test_no_product_is_left_out_by_the_compiler():
    model, params, arrays = lm.create_language_model(TINY)
    operands = steps.product_operands(lm.lm_product_shapes(TINY))
    program = jax.jit(steps.run_products).lower(operands).compile().as_text()
    assert program is not None and program.count(' dot(') == 3 * len(operands)


@pytest.mark.slow
def test_a_table_of_shares(capsys):
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
    assert times['on top of the products'] == pytest.approx(both - times['products'], abs=0.2)


def test_without_pytorch_an_error_says_how_to_get_it(monkeypatch):
    monkeypatch.delitem(sys.modules, 'attnlab.bench.lm_torch', raising=False)
    monkeypatch.setitem(sys.modules, 'torch', None)
    with pytest.raises(UserError, match='pip install'):
        importlib.import_module('attnlab.bench.lm_torch')


@pytest.mark.peers
def test_a_table_of_all_sides(monkeypatch, capsys):
    from attnlab.bench import lm_torch as peer

    monkeypatch.setattr(peer.torch, 'compile', lambda function: function)  # a minute, where nothing is cached
    lm.measure_language_model([TINY], rounds=2, seconds=1.0)
    machine, threads, _, sizes, head, *rows = capsys.readouterr().out.splitlines()
    assert 'torch' in machine and 'PyTorch on' in threads
    assert 'vocabulary 13, width 8' in sizes and all(side in head for side in steps.SIDES)
    assert [row[:18].strip() for row in rows[:3]] == ['training', 'decoding, batch 1', 'decoding, batch 8']
    for row in rows[1:3]:
        ours, theirs, nothing, ratio, none = row[18:].replace(',', '').split()
        assert float(ours) / float(theirs) == pytest.approx(float(ratio), rel=0.1, abs=0.01)
        assert nothing == none == '-'


@pytest.mark.peers
@pytest.mark.filterwarnings('ignore::DeprecationWarning')  # of PyTorch's own making, while it compiles
def test_all_go_down_the_same_road():
    small = TINY._replace(layers=1)
    functions, missing = lm.lm_training_steps(small, *lm.create_language_model(small))
    assert len(functions) + len(missing) == 3
    ours, *others = ([step() for _ in range(4)] for step in functions.values())
    for theirs in others:
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.peers
def test_where_nothing_compiles_a_line_says_why(monkeypatch, capsys):
    from attnlab.bench import lm_torch as peer

    def broken(function):
        def call(*args):
            raise RuntimeError('no C++ compiler\nand a long story')

        return call

    monkeypatch.setattr(peer.torch, 'compile', broken)
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
