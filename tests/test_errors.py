import math
import pickle

import pytest

from attnlab.errors import Diverged, RunError


def test_diverged_keeps_its_step_and_value_when_pickled():
    with pytest.raises(RunError, match=r'^step 7: the loss is nan; try a lower rate$') as caught:
        raise Diverged(7, 'loss', math.nan, 'try a lower rate')
    unpickled = pickle.loads(pickle.dumps(caught.value))
    assert (unpickled.step, unpickled.name, str(unpickled)) == (7, 'loss', str(caught.value))
    assert math.isnan(unpickled.value)
