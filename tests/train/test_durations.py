import pytest

from attnlab.errors import UserError
from attnlab.train.durations import duration_in_steps


@pytest.mark.parametrize(
    'text, expected',
    [
        ('7 steps', 7), ('1 step', 1), (' 3steps ', 3), ('0 steps', 0),
        ('1 epoch', 4), ('2.5 epochs', 10),  # 10 examples in batches of 3 are 4 batches, the last one padded
        ('9 examples', 3), ('10 examples', 4), ('10 percent', 4), ('10%', 4),
    ],
)  # fmt: skip
def test_duration_units(text, expected):
    assert duration_in_steps(text, 'train.duration', batch_size=3, examples=10, total=40) == expected


@pytest.mark.parametrize(
    'text',
    ['', '5', 'steps', '-1 steps', '1e3 steps', '5 minutes', 'nan steps', '5 steps 3', f'{"9" * 5000} steps'],
)
def test_invalid_duration_names_the_field(text):
    with pytest.raises(UserError, match=f'^train.duration is {text!r}; expected'):
        duration_in_steps(text, 'train.duration', batch_size=3, examples=10, total=40)


def test_percent_without_a_total_is_refused():
    with pytest.raises(UserError, match='steps, epochs or examples'):
        duration_in_steps('5 percent', 'train.duration', batch_size=3, examples=10)


def test_decimal_durations_are_exact():
    """Tenths of an epoch, a percent and an example, compared with integer arithmetic."""
    durations = lambda text, **sizes: duration_in_steps(
        text, 'train.duration', batch_size=sizes.pop('batch', 1), **sizes
    )
    assert durations('1.1 epochs', examples=50) == 55
    assert durations('7 percent', examples=1, total=100) == 7
    for tenths in range(1, 101):
        number = f'{tenths // 10}.{tenths % 10}'
        for size in range(1, 115):
            assert durations(f'{number} epochs', examples=size) == -(-tenths * size // 10)
            assert durations(f'{number} percent', examples=1, total=size) == -(-tenths * size // 1000)
            assert durations(f'{number} examples', examples=1, batch=size) == -(-tenths // (10 * size))
            assert durations(f'{tenths}%', examples=1, total=size) == -(-tenths * size // 100)
