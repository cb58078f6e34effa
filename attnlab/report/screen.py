"""Scores as lines of text."""

from typing import Any


def scores(found: dict[str, Any]) -> str:
    """What `eval` prints: a line a score, scores with a signature beside it, then BLEU by source length."""
    lines = []
    for name, value in found.items():
        if isinstance(value, float):
            lines.append(f'{name:<18} {value:8.4f}  {found.get(f"{name}_signature", "")}'.rstrip())
    for row in found.get('by_length', ()):
        words = f'{row["from"]}-{row["to"]} words'
        lines.append(f'{"bleu, " + words:<18} {row["bleu"]:8.4f}  {row["sentences"]} sentences')
    lines.append(f'{found["sentences"]} sentences, {found["parameters"]:,} parameters, step {found["step"]}')
    return '\n'.join(lines)
