"""The bench of the Vision Transformer, at sizes that take no time."""

from collections import Counter
from math import prod

import jax
import numpy as np
import pytest

from attnlab.bench import steps, vit
from tests.bench.products import multiplied

TINY = vit.VitSizes(side=8, width=8, layers=2, heads=2, mlp_width=12, classes=3, batch=5)


def test_the_products_are_those_of_the_program():
    """Each as (batch, inner size, the two outer ones in either order); images have no gradient."""
    model, params, arrays = vit.create_vit(TINY)
    loss = lambda params, arrays: steps.model_loss(model)(params, arrays, jax.random.key(0)).total
    found = Counter()
    for equation in jax.make_jaxpr(jax.grad(loss))(params, arrays).eqns:
        found.update(multiplied(equation))
    expected = Counter()
    for number, (left, right) in enumerate(vit.vit_product_shapes(TINY)):
        batch, M, K, N = prod(left[:-2]), *left[-2:], right[-1]
        backward = [(batch, M, *sorted((K, N)))] + [(batch, N, *sorted((M, K)))] * (number > 0)
        expected.update([(batch, K, *sorted((M, N))), *backward])
    assert found == expected


def test_batches_are_made_of_every_kind():
    _, title, head, *rows = vit.measure_input_speed(8, rounds=1, seconds=1.0).splitlines()
    assert 'batches of 8' in title and head.endswith('images a second')
    assert [row[:24].strip() for row in rows] == list(vit.INPUT_PIPELINES)
    assert all(float(row.split()[-1].replace(',', '')) > 0 for row in rows)


@pytest.mark.peers
def test_a_table_of_all_sides(monkeypatch, capsys):
    from attnlab.bench import vit_torch as peer

    monkeypatch.setattr(peer.torch, 'compile', lambda function: function)  # a minute, where nothing is cached
    vit.measure_vit([TINY], rounds=2, seconds=1.0)
    machine, threads, _, sizes, head, row, *profile = capsys.readouterr().out.splitlines()
    assert 'torch' in machine and 'PyTorch on' in threads and 'side 8, patch 4, width 8' in sizes
    assert all(side in head for side in steps.SIDES) and row.startswith('training')
    assert profile[0].startswith('a step of attnlab') and profile[1].split()[-1] == '100%'


@pytest.mark.peers
@pytest.mark.filterwarnings('ignore::DeprecationWarning')  # of PyTorch's own making, while it compiles
def test_all_go_down_the_same_road():
    functions, missing = vit.vit_training_steps(TINY, *vit.create_vit(TINY))
    assert len(functions) + len(missing) == 3
    ours, *others = ([step() for _ in range(4)] for step in functions.values())
    assert ours == sorted(ours, reverse=True)
    for theirs in others:
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
