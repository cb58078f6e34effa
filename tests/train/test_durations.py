import pytest

from attnlab.errors import UserError
from attnlab.train.durations import steps


@pytest.mark.parametrize(
    'text, expected',
    [
        ('7 steps', 7), ('1 step', 1), (' 3steps ', 3), ('0 steps', 0),
        ('1 epoch', 4), ('2.5 epochs', 10),  # 10 examples in batches of 3: 4 batches, the last one padded
        ('9 examples', 3), ('10 examples', 4), ('10 percent', 4), ('10%', 4),
    ],
)  # fmt: skip
def test_units(text, expected):
    assert steps(text, 'train.duration', batch_size=3, examples=10, total=40) == expected


@pytest.mark.parametrize('text', ['', '5', 'steps', '-1 steps', '1e3 steps', '5 minutes', 'nan steps', '5 steps 3'])
def test_anything_else_is_refused_by_name(text):
    with pytest.raises(UserError, match=f'train.duration is {text!r}; expected'):
        steps(text, 'train.duration', batch_size=3, examples=10, total=40)


def test_a_share_needs_a_whole():
    with pytest.raises(UserError, match='steps, epochs or examples'):
        steps('5 percent', 'train.duration', batch_size=3, examples=10)
