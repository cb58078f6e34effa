"""Values of config fields as text and on an axis; labels and number formats of scores."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MAX_VALUE_TICKS = 8
"""Most values of a key that each get a tick; with more, as in a random search, each value occurs once or twice."""

MAX_LABEL_LENGTH = 40
"""Characters of a label in a figure."""

SCORE_FORMATS = {  # key of scores-SPLIT.json -> label and number format; other numbers are labelled by their key
    'bleu': ('BLEU', '{:.1f}'),
    'bleu_words': ('BLEU of lower-cased words', '{:.1f}'),
    'chrf': ('chrF', '{:.1f}'),
    'exact_match': ('Exact match', '{:.1%}'),
    'aer_emit': ('AER, weights at the emitting step', '{:.3f}'),
    'aer_shifted': ('AER, weights shifted by one step', '{:.3f}'),
    'inversion_emit': ('Inverted adjectives aligned, emitting step', '{:.1%}'),
    'inversion_shifted': ('Inverted adjectives aligned, shifted by one', '{:.1%}'),
    'accuracy': ('Accuracy', '{:.1%}'),
    'top5': ('Top-5 accuracy', '{:.1%}'),
    'calibration_error': ('Calibration error', '{:.3f}'),
    'loss': ('Loss', '{:.3f}'),
    'perplexity': ('Perplexity', '{:.2f}'),
    'bits_per_character': ('Bits per character', '{:.3f}'),
}


class AxisScale(NamedTuple):
    """The scale of an axis, and the coordinates of a key's values on it.

    kind: 'category', 'linear' or 'log'.
    coordinates: repr of a value -> its coordinate: a number's own value, or the index of a category.
    ticks: (coordinate, label); at the values themselves if there are few.
    """

    kind: str
    coordinates: dict[str, float]
    ticks: list[tuple[float, str]]

    def coordinate(self, value: Any) -> float:
        """Return the position of a value on the axis, in units of the axis: the number, or the index of a category."""
        return self.coordinates[repr(value)]

    def fraction(self, coordinate: float) -> float:
        """Return how far along the axis a coordinate is: 0 at the smallest value, 1 at the largest, 0.5 if equal."""
        transform = math.log if self.kind == 'log' else float
        low, high = transform(min(self.coordinates.values())), transform(max(self.coordinates.values()))
        return (transform(coordinate) - low) / (high - low) if high > low else 0.5


def build_axis_scale(values: Sequence[Any], max_value_ticks: int = MAX_VALUE_TICKS) -> AxisScale:
    """Return the scale for values of a key: linear or logarithmic if all are numbers, otherwise categories.

    max_value_ticks: up to so many distinct numbers have a tick each; more numbers have ticks at round values.
    """
    distinct = list({repr(value): value for value in values}.values())
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in distinct):
        return AxisScale(
            'category',
            {repr(value): float(index) for index, value in enumerate(distinct)},
            [(float(index), shorten_label(format_value(value))) for index, value in enumerate(distinct)],
        )
    distinct.sort()
    logarithmic = _is_evenly_spaced_in_log(distinct)
    if len(distinct) <= max_value_ticks:
        ticks = [(float(value), format_value(value)) for value in distinct]
    elif logarithmic:
        first, last = (round(math.log10(value)) for value in (distinct[0], distinct[-1]))
        ticks = [(10.0**power, format_value(10.0**power)) for power in range(first, last + 1)]
    else:
        from matplotlib.ticker import MaxNLocator

        round_values = MaxNLocator(5).tick_values(distinct[0], distinct[-1])
        ticks = [(float(x), format_value(float(x))) for x in round_values if distinct[0] <= x <= distinct[-1]]
    kind = 'log' if logarithmic else 'linear'
    return AxisScale(kind, {repr(value): float(value) for value in distinct}, ticks)


def _is_evenly_spaced_in_log(ordered: Sequence[float]) -> bool:
    """Whether the median of sorted numbers is nearer to the middle of a logarithmic axis than of a linear one.

    False unless all numbers are positive and they span a factor of 10, or a factor of 4 for integers.
    """
    low, middle, high = ordered[0], statistics.median_low(ordered), ordered[-1]
    if low <= 0 or high / low < (10 if any(isinstance(number, float) for number in ordered) else 4):
        return False
    return abs(math.log(middle / low) / math.log(high / low) - 0.5) <= abs((middle - low) / (high - low) - 0.5)


def format_value(value: Any) -> str:
    """Return a value as it is written on the command line; a float has four significant digits.

    Characters that cannot be printed are escaped, so that the text of an experiment cannot end lines or send control
    sequences to a terminal.
    """
    match value:
        case bool():
            return str(value).lower()
        case float():
            return f'{value:.4g}'.replace('e-0', 'e-').replace('e+0', 'e')
        case tuple():
            return ','.join(map(format_value, value))
        case str() if not value.isprintable():
            return ''.join(c if c.isprintable() else c.encode('unicode_escape').decode('ascii') for c in value)
        case _:
            return str(value)


def describe_values(values: Mapping[str, Any]) -> str:
    """Return values as one line, such as `learning_rate=0.001, order=pre`."""
    return ', '.join(f'{key}={format_value(value)}' for key, value in values.items())


def shorten_label(text: str) -> str:
    """Return the text cut to `MAX_LABEL_LENGTH` characters, for a figure."""
    return crop_text(text, MAX_LABEL_LENGTH)


def crop_text(text: str, length: int) -> str:
    """Return the text in at most `length` characters; a text that is cut ends in an ellipsis."""
    return text if len(text) <= length else text[: length - 1] + '…'
