"""Scores as text for a terminal."""

from typing import Any


def format_scores(scores: dict[str, Any]) -> str:
    """Return the lines that `attnlab eval` prints.

    One line for each score, with its signature if it has one; then BLEU by source length, alignment error rate by
    layer, and a line of counts.
    """
    lines = []
    for name, value in scores.items():
        if isinstance(value, float):
            lines.append(f'{name:<18} {value:8.4f}  {scores.get(f"{name}_signature", "")}'.rstrip())
    for row in scores.get('by_length', ()):
        words = f'{row["from"]}-{row["to"]} words'
        lines.append(f'{"bleu, " + words:<18} {row["bleu"]:8.4f}  {row["sentences"]} sentences')
    for row in scores.get('aer_by_layer', ()):
        lines.append(f'{"AER, layer " + str(row["layer"]):<18} {row["emit"]:8.4f}  shifted {row["shifted"]:.4f}')
    last = ('parameters', 'step')
    counts = [f'{value:,} {name}' for name, value in scores.items() if isinstance(value, int) and name not in last]
    return '\n'.join([*lines, ', '.join([*counts, f'{scores["parameters"]:,} parameters', f'step {scores["step"]}'])])
