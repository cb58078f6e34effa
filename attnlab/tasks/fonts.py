"""Fonts of figures: DejaVu Sans, which comes with matplotlib, and installed fonts for scripts that it lacks."""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FONT = 'DejaVu Sans'
"""Comes with matplotlib, so figures look the same on every machine; covers accents and ligatures."""


def set_text_fonts(figure: Figure) -> None:
    """Set the fonts of all texts of a finished figure, and turn off mathematical notation between dollar signs.

    Characters that no installed font has are drawn as boxes, and one line of the log names them.
    """
    from matplotlib.text import Text

    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_ticklabels(which='both')  # matplotlib creates tick labels on demand; `findobj` must find them
    texts: Iterable[Any] = figure.findobj(Text)
    characters = frozenset().union(*(text.get_text() for text in texts))
    drawn = ''.join(sorted(c for c in characters if unicodedata.category(c)[0] not in 'CZ'))
    families, missing = find_fallback_families(drawn)
    for text in texts:
        text.set_parse_math(False)
        text.set_fontfamily([FONT, *families])
    if missing:
        _warn_of_missing(missing)


@cache
def find_fallback_families(characters: str) -> tuple[list[str], str]:
    """Return the font families needed beside `FONT`, and the characters that no installed font has."""
    missing = ''.join(c for c in characters if not _has_character(FONT, c))
    if not missing:
        return [], ''
    return choose_families(missing, _rank_families(_installed_families(), missing), _has_character)


def choose_families(
    characters: str, families: Sequence[str], has_character: Callable[[str, str], bool]
) -> tuple[list[str], str]:
    """Return the first families that together cover the characters, and the characters that no family has.

    families: in order of preference.  has_character: (family, character) -> whether the family has the character.
    """
    chosen = []
    for family in families:
        uncovered = ''.join(c for c in characters if not has_character(family, c))
        if uncovered != characters:
            chosen.append(family)
        characters = uncovered
        if not characters:
            break
    return chosen, characters


def _rank_families(families: Iterable[str], characters: str) -> list[str]:
    """Sort families, most suitable first: named after a script of the characters, regular weight, from Noto."""
    scripts = {unicodedata.name(c, '?').split()[0] for c in characters}
    # Noto's fonts for Chinese, Japanese and Korean have the same characters in the shapes of each country.
    region = 'JP' if scripts & {'HIRAGANA', 'KATAKANA'} else 'KR' if 'HANGUL' in scripts else 'SC'

    def rank(family: str) -> tuple[Any, ...]:
        words = family.split()
        has_style = bool({'Serif', 'Mono', 'Bold', 'Light', 'Thin', 'Black', 'Medium'} & set(words))
        names_script = bool(scripts & set(family.upper().split()))
        return not names_script, has_style, not family.startswith('Noto Sans'), region not in words, family

    return sorted(families, key=rank)


@cache
def _installed_families() -> frozenset[str]:
    """All installed families with outline glyphs, also those installed after matplotlib cached its list of fonts."""
    from matplotlib import font_manager

    logging.getLogger('matplotlib.font_manager').setLevel(logging.ERROR)  # a warning for each family without weight 400
    listed = {str(entry.fname) for entry in font_manager.fontManager.ttflist}
    for path in font_manager.findSystemFonts():
        if path not in listed:
            try:
                font_manager.fontManager.addfont(path)
            except (OSError, RuntimeError):  # matplotlib cannot read this font
                continue
    names = {entry.name for entry in font_manager.fontManager.ttflist}
    # Emoji fonts are bitmaps, and LastResort draws boxes.
    return frozenset(name for name in names if not {'Emoji', 'LastResort'} & set(name.split()))


@cache
def _load_font(family: str) -> Any:
    """Return matplotlib's font object of a family, or None if the family is not installed or cannot be read."""
    from matplotlib import font_manager

    try:
        return font_manager.get_font(font_manager.findfont(family, fallback_to_default=False))
    except (OSError, RuntimeError, ValueError):
        return None


def _has_character(family: str, character: str) -> bool:
    font = _load_font(family)
    return font is not None and font.get_char_index(ord(character)) != 0


@cache
def _warn_of_missing(characters: str) -> None:
    """Log characters without a font; the cache makes it once for each set of characters."""
    listed = ' '.join(characters[:10]) + (' ...' if len(characters) > 10 else '')
    logging.warning('no installed font has %s, drawn as boxes; install a font that has them, such as Noto', listed)
