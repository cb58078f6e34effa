"""Values of a config's fields, as text and on an axis; labels and formats of scores."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MAX_VALUE_TICKS = 8  # values of a key from which on each is seen once or twice, as in a random search
MAX_LABEL_LENGTH = 40

SCORE_FORMATS = {  # key of scores-SPLIT.json -> label and format; a number without an entry is shown by its key
    'bleu': ('BLEU', '{:.1f}'),
    'bleu_words': ('BLEU of lower-cased words', '{:.1f}'),
    'chrf': ('chrF', '{:.1f}'),
    'exact_match': ('Exact match', '{:.1%}'),
    'aer_emit': ('AER, weights at the emitting step', '{:.3f}'),
    'aer_shifted': ('AER, weights shifted by one step', '{:.3f}'),
    'inversion_emit': ('Inverted adjectives found, emitting step', '{:.1%}'),
    'inversion_shifted': ('Inverted adjectives found, shifted by one', '{:.1%}'),
    'accuracy': ('Accuracy', '{:.1%}'),
    'top5': ('Among the five likeliest', '{:.1%}'),
    'calibration_error': ('Calibration error', '{:.3f}'),
    'loss': ('Loss', '{:.3f}'),
    'perplexity': ('Perplexity', '{:.2f}'),
    'bits_per_character': ('Bits per character', '{:.3f}'),
}


class AxisScale(NamedTuple):
    """Where the values of a key stand on an axis.

    kind: 'category', 'linear' or 'log'.  places: repr of a value -> its place; of numbers, themselves.
    ticks: (place, label), at the values themselves where these are few.
    """

    kind: str
    places: dict[str, float]
    ticks: list[tuple[float, str]]

    def place(self, value: Any) -> float:
        return self.places[repr(value)]

    def height(self, place: float) -> float:
        """From 0 at the least value to 1 at the largest; one half where there is but one."""
        turned = math.log if self.kind == 'log' else float
        low, high = turned(min(self.places.values())), turned(max(self.places.values()))
        return (turned(place) - low) / (high - low) if high > low else 0.5


def build_axis_scale(values: Sequence[Any], few: int = MAX_VALUE_TICKS) -> AxisScale:
    """Numbers on an axis of numbers, all else as categories.

    few: more values than these are not all ticks.
    """
    distinct = list({repr(value): value for value in values}.values())
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in distinct):
        return AxisScale(
            'category',
            {repr(value): float(at) for at, value in enumerate(distinct)},
            [(float(at), shorten_label(format_value(value))) for at, value in enumerate(distinct)],
        )
    distinct.sort()
    wide = _spread_by_factors(distinct)
    if len(distinct) <= few:
        ticks = [(float(value), format_value(value)) for value in distinct]
    elif wide:
        first, last = (round(math.log10(value)) for value in (distinct[0], distinct[-1]))
        ticks = [(10.0**power, format_value(10.0**power)) for power in range(first, last + 1)]
    else:
        from matplotlib.ticker import MaxNLocator

        found = MaxNLocator(5).tick_values(distinct[0], distinct[-1])
        ticks = [(float(at), format_value(float(at))) for at in found if distinct[0] <= at <= distinct[-1]]
    return AxisScale('log' if wide else 'linear', {repr(value): float(value) for value in distinct}, ticks)


def _spread_by_factors(ordered: Sequence[float]) -> bool:
    """Whether positive numbers that span a decade, whole ones a factor of 4, lie more evenly by their logarithms."""
    low, middle, high = ordered[0], statistics.median_low(ordered), ordered[-1]
    if low <= 0 or high / low < (10 if any(isinstance(number, float) for number in ordered) else 4):
        return False
    return abs(math.log(middle / low) / math.log(high / low) - 0.5) <= abs((middle - low) / (high - low) - 0.5)


def format_value(value: Any) -> str:
    """A value as the command line takes it, a float in four digits; what cannot be printed in a line is escaped."""
    match value:
        case bool():
            return str(value).lower()
        case float():
            return f'{value:.4g}'.replace('e-0', 'e-').replace('e+0', 'e')
        case tuple():
            return ','.join(map(format_value, value))
        case str() if not value.isprintable():  # the text of an experiment must not end lines or command terminals
            return ''.join(c if c.isprintable() else c.encode('unicode_escape').decode('ascii') for c in value)
        case _:
            return str(value)


def describe_values(values: Mapping[str, Any]) -> str:
    """`learning_rate=0.001, order=pre`."""
    return ', '.join(f'{key}={format_value(value)}' for key, value in values.items())


def shorten_label(text: str) -> str:
    """The text, short enough to be drawn; `heatmap.render_png` keeps matplotlib from reading mathematics between dollars."""
    return crop_text(text, MAX_LABEL_LENGTH)


def crop_text(text: str, length: int) -> str:
    """The text, its end in dots where it is longer."""
    return text if len(text) <= length else text[: length - 1] + '…'
