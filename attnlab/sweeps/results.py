"""What came of a sweep, as a table."""

from pathlib import Path

from attnlab.sweeps.outcome import Sweep


def show(sweep: Sweep) -> None:
    """Prints every point."""
    for row in sweep.rows:
        print(row.number, row.name, row.status, row.value, row.step, row.seconds, row.reason, sep='\t')


def report(folder: Path) -> Path:
    """Where the sweep's page is."""
    return folder
