"""The spec of a sweep in its directory, compared with that of the command line."""

import pytest

from attnlab.sweeps import sweep_directory


@pytest.mark.parametrize(('here', 'there', 'text'), [
    ([1], [2], 'point 0 is rate=1 here and rate=2 there'),
    ([3, 1], [3, 1.0], 'point 1 is rate=1 here and rate=1.0 there'),  # equal as values
])  # fmt: skip
def test_the_first_point_that_differs_is_described(here, there, text):
    point = lambda i, rate: {'name': str(i), 'overrides': {'rate': rate}}
    points = [[point(i, rate) for i, rate in enumerate(rates)] for rates in (here, there)]
    assert sweep_directory._describe_difference(*points) == text
