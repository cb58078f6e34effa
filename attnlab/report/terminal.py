"""Scores as lines of text."""

from typing import Any


def format_scores(found: dict[str, Any]) -> str:
    """What `eval` prints: a line per score with its signature, scores by source length and by layer, then counts."""
    lines = []
    for name, value in found.items():
        if isinstance(value, float):
            lines.append(f'{name:<18} {value:8.4f}  {found.get(f"{name}_signature", "")}'.rstrip())
    for row in found.get('by_length', ()):
        words = f'{row["from"]}-{row["to"]} words'
        lines.append(f'{"bleu, " + words:<18} {row["bleu"]:8.4f}  {row["sentences"]} sentences')
    for row in found.get('aer_by_layer', ()):
        lines.append(f'{"AER, layer " + str(row["layer"]):<18} {row["emit"]:8.4f}  shifted {row["shifted"]:.4f}')
    last = ('parameters', 'step')
    counts = [f'{value:,} {name}' for name, value in found.items() if isinstance(value, int) and name not in last]
    return '\n'.join([*lines, ', '.join([*counts, f'{found["parameters"]:,} parameters', f'step {found["step"]}'])])
