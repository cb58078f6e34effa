"""Fonts for any script: which are chosen, and the characters without one."""

import pytest
from matplotlib.text import Text

from attnlab.tasks import fonts, heatmap

COVERED = {'Kana': 'かな', 'Thai': 'ไทย', 'Both': 'かなไทย', 'None': ''}


@pytest.fixture
def anew():
    """Without the choices and reports of earlier tests, before and after."""
    caches = (fonts.find_fallback_families, fonts._families, fonts._report)
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


@pytest.mark.parametrize(('order', 'characters', 'families', 'missing'), [
    (['None', 'Kana', 'Both', 'Thai'], 'かไ', ['Kana', 'Both'], ''),
    (['Both', 'Kana', 'Thai'], 'かไ', ['Both'], ''),
    (['Kana', 'Thai'], 'かไ日', ['Kana', 'Thai'], '日'),
    ([], '日', [], '日'),
])  # fmt: skip
def test_the_first_families_that_cover_all_characters_are_chosen(order, characters, families, missing):
    assert fonts.choose_families(characters, order, lambda family, c: c in COVERED[family]) == (families, missing)


@pytest.mark.parametrize(('characters', 'first'), [
    ('ไทย', 'Noto Sans Thai'), ('日', 'Noto Sans CJK SC'), ('日かな', 'Noto Sans CJK JP'), ('한글', 'Noto Sans CJK KR'),
])  # fmt: skip
def test_a_plain_font_of_the_script_comes_first(characters, first):
    names = ['Any', 'Noto Serif Thai', 'Noto Sans Thai Bold', 'Noto Sans Thai', 'Noto Sans']
    names += [f'Noto {kind} CJK {region}' for kind in ('Serif', 'Sans') for region in ('HK', 'JP', 'KR', 'SC')]
    assert fonts._ranked(names, characters)[0] == first


def test_characters_without_a_font_are_named_in_one_line(anew, monkeypatch, caplog):
    monkeypatch.setattr(fonts, '_families', lambda: frozenset())
    for _ in range(2):
        heatmap.render_png(heatmap.plot_heatmap([[1.0]], ['日本'], ['ไท\u200b é']))
    (line,) = caplog.messages
    assert line.startswith('no installed font has ท ไ 日 本, drawn as boxes') and 'Noto' in line


def test_all_texts_of_a_picture_have_the_fonts_of_its_scripts(anew, monkeypatch):
    monkeypatch.setattr(fonts, '_families', lambda: frozenset({'DejaVu Serif'}))
    monkeypatch.setattr(fonts, '_has', lambda family, c: c < 'z' or family == 'DejaVu Serif')
    picture = heatmap.plot_heatmap([[1.0]], ['日'], ['a'], title='b')
    fonts.set_text_fonts(picture)
    assert {tuple(text.get_fontfamily()) for text in picture.findobj(Text)} == {('DejaVu Sans', 'DejaVu Serif')}


@pytest.mark.parametrize('word', ['日本語', '中文', '한국어', 'สวัสดี', 'हिन्दी'])
def test_words_of_installed_scripts_are_drawn_without_a_warning(word, anew, caplog):
    if fonts.find_fallback_families(word)[1]:
        pytest.skip('no font of this script is installed')
    heatmap.render_png(heatmap.plot_heatmap([[1.0]], [word], ['a']))
    assert not caplog.messages
