"""The Vision Transformer benchmark, at tiny sizes."""

from collections import Counter
from math import prod

import jax
import numpy as np
import pytest

from attnlab.bench import steps, vit
from tests.bench.products import matrix_products

TINY = vit.VitSizes(side=8, width=8, layers=2, heads=2, mlp_width=12, classes=3, batch=5)


@pytest.mark.slow
def test_product_shapes_are_those_of_the_program():
    """Products of forward and backward, in the form of `matrix_products`; images have no gradient."""
    model, params, arrays = vit.create_vit(TINY)
    loss = lambda params, arrays: steps.model_loss(model)(params, arrays, jax.random.key(0)).total
    traced = Counter()
    for equation in jax.make_jaxpr(jax.grad(loss))(params, arrays).eqns:
        traced.update(matrix_products(equation))
    expected = Counter()
    for number, (left, right) in enumerate(vit.vit_product_shapes(TINY)):
        batch, M, K, N = prod(left[:-2]), *left[-2:], right[-1]
        backward = [(batch, M, *sorted((K, N)))] + [(batch, N, *sorted((M, K)))] * (number > 0)
        expected.update([(batch, K, *sorted((M, N))), *backward])
    assert traced == expected


def test_every_input_pipeline_is_measured():
    _, title, head, *rows = vit.measure_input_speed(8, rounds=1, seconds=1.0).splitlines()
    assert 'batches of 8' in title and head.endswith('images a second')
    assert [row[:24].strip() for row in rows] == list(vit.INPUT_PIPELINES)
    assert all(float(row.split()[-1].replace(',', '')) > 0 for row in rows)


@pytest.mark.peers
def test_the_table_has_all_frameworks(monkeypatch, capsys):
    from attnlab.bench import vit_torch as peer

    monkeypatch.setattr(peer.torch, 'compile', lambda function: function)  # compiling takes a minute without a cache
    vit.measure_vit([TINY], rounds=2, seconds=1.0)
    machine, threads, _, sizes, head, row, *profile = capsys.readouterr().out.splitlines()
    assert 'torch' in machine and 'PyTorch on' in threads and 'side 8, patch 4, width 8' in sizes
    assert all(framework in head for framework in steps.FRAMEWORKS) and row.startswith('training')
    assert profile[0].startswith('a step of attnlab') and profile[1].split()[-1] == '100%'


@pytest.mark.peers
@pytest.mark.filterwarnings('ignore::DeprecationWarning')  # PyTorch itself, during compilation
def test_all_frameworks_have_the_same_losses():
    functions, missing = vit.vit_training_steps(TINY, *vit.create_vit(TINY))
    assert len(functions) + len(missing) == 3
    ours, *others = ([step() for _ in range(4)] for step in functions.values())
    assert ours == sorted(ours, reverse=True)
    for theirs in others:
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
