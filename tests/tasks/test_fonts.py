"""Selection of fonts for any script, and characters that no font has."""

import pytest
from matplotlib.text import Text

from attnlab.tasks import fonts, heatmap

COVERED = {'Kana': 'かな', 'Thai': 'ไทย', 'Both': 'かなไทย', 'None': ''}


@pytest.fixture
def empty_caches():
    """Empty the caches of fonts and warnings before and after a test."""
    cached_functions = (fonts.find_fallback_families, fonts._installed_families, fonts._warn_of_missing)
    for function in cached_functions:
        function.cache_clear()
    yield
    for function in cached_functions:
        function.cache_clear()


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
def test_regular_font_of_the_script_ranks_first(characters, first):
    names = ['Any', 'Noto Serif Thai', 'Noto Sans Thai Bold', 'Noto Sans Thai', 'Noto Sans']
    names += [f'Noto {kind} CJK {region}' for kind in ('Serif', 'Sans') for region in ('HK', 'JP', 'KR', 'SC')]
    assert fonts._rank_families(names, characters)[0] == first


def test_characters_without_a_font_are_logged_once(empty_caches, monkeypatch, caplog):
    monkeypatch.setattr(fonts, '_installed_families', lambda: frozenset())
    for _ in range(2):
        heatmap.render_png(heatmap.plot_heatmap([[1.0]], ['日本'], ['ไท\u200b é']))
    (line,) = caplog.messages
    assert line.startswith('no installed font has ท ไ 日 本, drawn as boxes') and 'Noto' in line


def test_all_texts_of_a_figure_get_the_fallback_families(empty_caches, monkeypatch):
    monkeypatch.setattr(fonts, '_installed_families', lambda: frozenset({'DejaVu Serif'}))
    monkeypatch.setattr(fonts, '_has_character', lambda family, c: c < 'z' or family == 'DejaVu Serif')
    figure = heatmap.plot_heatmap([[1.0]], ['日'], ['a'], title='b')
    fonts.set_text_fonts(figure)
    assert {tuple(text.get_fontfamily()) for text in figure.findobj(Text)} == {('DejaVu Sans', 'DejaVu Serif')}


@pytest.mark.parametrize('word', ['日本語', '中文', '한국어', 'สวัสดี', 'हिन्दी'])
def test_words_of_installed_scripts_are_drawn_without_a_warning(word, empty_caches, caplog):
    if fonts.find_fallback_families(word)[1]:
        pytest.skip('no font of this script is installed')
    heatmap.render_png(heatmap.plot_heatmap([[1.0]], [word], ['a']))
    assert not caplog.messages
