"""Progress bar on the terminal: steps, rate, time left, and the newest metrics."""

import sys
from collections.abc import Callable
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, start: int, shown: bool = True):
    """Yield a function `advance(step, values)` that updates the bar.

    Nothing is drawn if standard error is not a terminal, or if `shown` is False.  Steps, rate and time left fit in a
    line of 80 columns; as many of the values as fit are shown after them.

    total: number of steps of the run.  start: steps already done.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class RateColumn(ProgressColumn):
        def render(self, task) -> Text:
            if not task.speed:
                return Text('')
            return Text(f'{task.speed:.{2 if task.speed < 100 else 0}f} steps/s')

    console = Console(file=sys.stderr)
    bar_width = 40 if console.width >= 140 else 10
    columns = BarColumn(bar_width), MofNCompleteColumn(), RateColumn(), TimeRemainingColumn()
    used_width = bar_width + len(f'{total}/{total}') + len('99.99 steps/s') + len('99:59:59') + len(columns)

    def format_values(values: dict[str, float]) -> str:
        available_width, line = console.width - used_width, ''
        for name, value in values.items():
            longer_line = f'{line}  {name} {value:.3g}'.lstrip()
            if len(longer_line) > available_width:
                break
            line = longer_line
        return line

    with Progress(*columns, TextColumn('{task.description}'), console=console, disable=not shown) as progress:
        task = progress.add_task('', total=total, completed=start)
        advance: Callable[[int, dict[str, float]], None] = lambda step, values: progress.update(
            task, completed=step, description=format_values(values)
        )
        yield advance
