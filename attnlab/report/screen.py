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
    for row in found.get('aer_by_layer', ()):
        lines.append(f'{"AER, layer " + str(row["layer"]):<18} {row["emit"]:8.4f}  shifted {row["shifted"]:.4f}')
    what = next(f'{found[name]:,} {name}' for name in ('sentences', 'tokens', 'images') if name in found)
    lines.append(f'{what}, {found["parameters"]:,} parameters, step {found["step"]}')
    return '\n'.join(lines)
