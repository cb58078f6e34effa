"""Values of config fields as text and on an axis."""

import numpy as np
import pytest

from attnlab.report.values import build_axis_scale, describe_values

RATES = (1e-4, 1e-3, 1e-2)


@pytest.mark.parametrize(('values', 'kind', 'labels'), [
    (RATES, 'log', ['0.0001', '0.001', '0.01']),
    ((1e-5, 3e-2), 'log', ['1e-5', '0.03']),
    ((0.1, 0.2, 0.4), 'linear', ['0.1', '0.2', '0.4']),  # less than a factor of 10
    ((0.0, 0.1, 1.0), 'linear', ['0', '0.1', '1']),
    ((-1.0, 100.0), 'linear', ['-1', '100']),
    ((8, 1, 2, 4), 'log', ['1', '2', '4', '8']),
    ((1, 2, 3), 'linear', ['1', '2', '3']),
    (('pre', 'a/b c', 'pre'), 'category', ['pre', 'a/b c']),
    ((True, False), 'category', ['true', 'false']),
    ((1, True), 'category', ['1', 'true']),
    ((None, 2), 'category', ['None', '2']),
    (((16, 16), (8, 8)), 'category', ['16,16', '8,8']),
    (('$x$', 'y' * 50), 'category', ['$x$', 'y' * 39 + '…']),
])  # fmt: skip
def test_axis_kind_and_ticks_follow_the_values(values, kind, labels):
    scale = build_axis_scale(values)
    assert scale.kind == kind
    assert [label for _, label in scale.ticks] == labels


def test_many_values_have_ticks_at_round_numbers():
    random = np.random.default_rng(0)
    rates = build_axis_scale([float(10**power) for power in random.uniform(-5, -1, 50)])
    assert rates.kind == 'log' and [label for _, label in rates.ticks] == ['1e-5', '0.0001', '0.001', '0.01', '0.1']
    # These span a factor of 500, but are uniformly distributed.
    uniform = build_axis_scale([float(rate) for rate in random.uniform(0.001, 0.5, 50)])
    assert uniform.kind == 'linear' and [label for _, label in uniform.ticks] == ['0.1', '0.2', '0.3', '0.4']
    smallest, largest = min(rates.coordinates.values()), max(rates.coordinates.values())
    assert rates.fraction(smallest) == 0.0 and rates.fraction(largest) == 1.0


def test_equal_factors_are_equal_distances_on_a_logarithmic_axis():
    assert [build_axis_scale(RATES).fraction(rate) for rate in RATES] == pytest.approx([0, 0.5, 1])
    assert [build_axis_scale((1, 2, 3)).fraction(value) for value in (1, 2, 3)] == [0, 0.5, 1]
    assert build_axis_scale((7,)).fraction(7) == 0.5


def test_values_are_described_as_the_command_line_takes_them():
    text = describe_values(
        {'rate': 0.00123456, 'tied': True, 'shape': (16, 8), 'warmup': '10 steps', 'none': None, 'e': 1e-7}
    )
    assert text == 'rate=0.001235, tied=true, shape=16,8, warmup=10 steps, none=None, e=1e-7'
