"""The bar on the screen: steps, rate, time left, the newest numbers."""

import sys
from collections.abc import Callable
from contextlib import contextmanager


@contextmanager
def bar(total: int, start: int):
    """Yields `advance(step, values)`.  Nothing is drawn where the screen is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task) -> Text:
            return Text(f'{task.speed:.2f} steps/s' if task.speed else '')

    columns = (TextColumn('training'), BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
    with Progress(*columns, TextColumn('{task.description}'), console=Console(file=sys.stderr)) as progress:
        shown = progress.add_task('', total=total, completed=start)
        advance: Callable[[int, dict[str, float]], None] = lambda step, values: progress.update(
            shown, completed=step, description='  '.join(f'{name} {value:.3g}' for name, value in values.items())
        )
        yield advance
