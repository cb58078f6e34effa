"""The bar on the screen: steps, rate, time left, the newest numbers."""

import sys
from collections.abc import Callable
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, start: int, shown: bool = True):
    """Yields `advance(step, values)`.  Nothing is drawn where the screen is not a terminal, nor unless `shown`.

    Steps, rate and time left always stand in a line of 80 columns; of the values, as many as fit behind them.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task) -> Text:
            if not task.speed:
                return Text('')
            return Text(f'{task.speed:.{2 if task.speed < 100 else 0}f} steps/s')

    console = Console(file=sys.stderr)
    length = 40 if console.width >= 140 else 10
    columns = BarColumn(length), MofNCompleteColumn(), Rate(), TimeRemainingColumn()
    taken = length + len(f'{total}/{total}') + len('99.99 steps/s') + len('99:59:59') + len(columns)

    def fitting(values: dict[str, float]) -> str:
        room, line = console.width - taken, ''
        for name, value in values.items():
            longer = f'{line}  {name} {value:.3g}'.lstrip()
            if len(longer) > room:
                break
            line = longer
        return line

    with Progress(*columns, TextColumn('{task.description}'), console=console, disable=not shown) as progress:
        task = progress.add_task('', total=total, completed=start)
        advance: Callable[[int, dict[str, float]], None] = lambda step, values: progress.update(
            task, completed=step, description=fitting(values)
        )
        yield advance
