"""The bar on the screen: steps, rate, time left, the newest numbers."""

import sys
from collections.abc import Callable
from contextlib import contextmanager


@contextmanager
def bar(total: int, start: int, shown: bool = True):
    """Yields `advance(step, values)`.  Nothing is drawn where the screen is not a terminal, nor unless `shown`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task) -> Text:
            return Text(f'{task.speed:.2f} steps/s' if task.speed else '')

    columns = (TextColumn('training'), BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
    console, text = Console(file=sys.stderr), TextColumn('{task.description}')
    with Progress(*columns, text, console=console, disable=not shown) as progress:
        task = progress.add_task('', total=total, completed=start)
        advance: Callable[[int, dict[str, float]], None] = lambda step, values: progress.update(
            task, completed=step, description='  '.join(f'{name} {value:.3g}' for name, value in values.items())
        )
        yield advance
