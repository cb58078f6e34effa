"""Fonts of a picture: DejaVu Sans, which comes with matplotlib, and installed ones for the scripts that it lacks."""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FONT = 'DejaVu Sans'  # the same picture everywhere, accents and ligatures included


def set_text_fonts(figure: Figure) -> None:
    """Prepare all texts of a finished figure: no mathematics between dollars, and a font for every character.

    Logs one line that names the characters without any installed font; they are drawn as boxes.
    """
    from matplotlib.text import Text

    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_ticklabels(which='both')  # creates them
    texts: Iterable[Any] = figure.findobj(Text)
    characters = frozenset().union(*(text.get_text() for text in texts))
    families, missing = find_fallback_families(
        ''.join(sorted(c for c in characters if unicodedata.category(c)[0] not in 'CZ'))
    )
    for text in texts:
        text.set_parse_math(False)
        text.set_fontfamily([FONT, *families])
    if missing:
        _report(missing)


@cache
def find_fallback_families(characters: str) -> tuple[list[str], str]:
    """Families beside `FONT` that the characters need, and the characters that no installed font has."""
    missing = ''.join(c for c in characters if not _has(FONT, c))
    return choose_families(missing, _ranked(_families(), missing), _has) if missing else ([], '')


def choose_families(characters: str, families: Sequence[str], has: Callable[[str, str], bool]) -> tuple[list[str], str]:
    """The first of the families that cover the characters together, and the characters that none has."""
    chosen = []
    for family in families:
        left = ''.join(c for c in characters if not has(family, c))
        if left != characters:
            chosen.append(family)
        characters = left
        if not characters:
            break
    return chosen, characters


def _ranked(families: Iterable[str], characters: str) -> list[str]:
    """Most suitable families first: named after a script of the characters, plain rather than bold, from Noto."""
    scripts = {unicodedata.name(c, '?').split()[0] for c in characters}
    # Noto's fonts for Chinese, Japanese and Korean have the same characters in the shapes of each country.
    region = 'JP' if scripts & {'HIRAGANA', 'KATAKANA'} else 'KR' if 'HANGUL' in scripts else 'SC'

    def rank(family: str) -> tuple[Any, ...]:
        words = family.split()
        marked = bool({'Serif', 'Mono', 'Bold', 'Light', 'Thin', 'Black', 'Medium'} & set(words))
        named = bool(scripts & set(family.upper().split()))
        return not named, marked, not family.startswith('Noto Sans'), region not in words, family

    return sorted(families, key=rank)


@cache
def _families() -> frozenset[str]:
    """All installed families with outlines, also those installed after matplotlib listed the fonts."""
    from matplotlib import font_manager

    logging.getLogger('matplotlib.font_manager').setLevel(logging.ERROR)  # a warning for each family without weight 400
    listed = {str(entry.fname) for entry in font_manager.fontManager.ttflist}
    for path in font_manager.findSystemFonts():
        if path not in listed:
            try:
                font_manager.fontManager.addfont(path)
            except (OSError, RuntimeError):  # a font that matplotlib cannot read is no use here
                continue
    names = {entry.name for entry in font_manager.fontManager.ttflist}
    return frozenset(name for name in names if not {'Emoji', 'LastResort'} & set(name.split()))  # bitmaps, boxes


@cache
def _font(family: str) -> Any:
    from matplotlib import font_manager

    try:
        return font_manager.get_font(font_manager.findfont(family, fallback_to_default=False))
    except (OSError, RuntimeError, ValueError):
        return None


def _has(family: str, character: str) -> bool:
    font = _font(family)
    return font is not None and font.get_char_index(ord(character)) != 0


@cache
def _report(characters: str) -> None:
    """Logs characters without a font, once."""
    shown = ' '.join(characters[:10]) + (' ...' if len(characters) > 10 else '')
    logging.warning('no installed font has %s, drawn as boxes; install one that does, such as those of Noto', shown)
