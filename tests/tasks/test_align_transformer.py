"""A tiny Transformer that translates: its alignments, its attention, its beams."""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import cli
from attnlab.configs import TranslatorConfig
from attnlab.data.alignments import alignment_error_rate
from attnlab.data.text import tokenise
from attnlab.data.vocabulary import BOS, EOS
from attnlab.decode.beam import beam_search
from attnlab.decode.greedy import greedy_search
from attnlab.errors import UserError
from attnlab.models.sequence2sequence import make_sequence2sequence_model
from attnlab.tasks import create_task, heatmap
from attnlab.tasks.align import corpus as pairs
from attnlab.tasks.align.translator import Translator
from attnlab.train import run
from tests.tiny import hash_run_files, tiny_grammar_config, tiny_transformer_config

SENTENCES = ['the black cat sleeps.', 'Marie sings.', 'he does not see the small house.']


@pytest.fixture(scope='module')
def french(translating):
    """Task, parameters and the ids of `SENTENCES`."""
    task, params, _ = run.load_run(translating)
    return task, params, pairs.encode_sentences(SENTENCES, task.vocabularies[0])


def test_every_layer_is_scored_as_an_alignment(translating, french):
    _, scores = run.evaluate_run(translating)
    each = scores['aer_by_layer']
    assert (each[1]['emit'], each[1]['shifted']) == (scores['aer_emit'], scores['aer_shifted'])  # layer 2 is chosen
    task, params, _ = french
    test = pairs.read_pairs(task.config.data, 'test', task.config.seed)
    weights = task.translator.force(params, *pairs.encode_pairs(test, task.vocabularies))[2]
    for layer, row in enumerate(each):
        for name, late in (('emit', 0), ('shifted', 1)):  # every token is a word, and the last are no words
            found = [{(int(one[layer, t + late, :-1].argmax()), t) for t in range(one.shape[1] - 1)} for one in weights]
            assert row[name] == pytest.approx(alignment_error_rate(found, test.links).aer), (layer, name)
    assert [row['layer'] for row in each] == [1, 2] and each[0]['emit'] != each[1]['emit']


def test_every_attention_of_a_translation_is_drawn(translating, french, capsys):
    task, _, source = french
    before = hash_run_files(translating)
    assert cli.main(['attend', f'--workdir={translating}', '--layer=2', SENTENCES[0]]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    kinds = ('encoder-attention', 'decoder-attention', 'decoder-cross_attention')
    assert {path.name for path in written} == {'weights.npz', *(f'{kind}-layer2.png' for kind in kinds)}
    assert hash_run_files(translating) == before
    with np.load(written[0], allow_pickle=False) as arrays:
        weights = {kind: arrays[kind.replace('-', '.')] for kind in kinds}
        labels = {name: arrays[name].tolist() for name in arrays.files if ' ' in name}
    typed, made = [*tokenise(SENTENCES[0]), '</s>'], labels['rows decoder.cross_attention']
    pieces = task.vocabularies[0].pieces(source[0])
    read = [f'{word} <unk>' if piece == '<unk>' else piece for word, piece in zip(typed, pieces, strict=True)]
    fed = ['<s>', *made[:-1]]
    assert labels['columns decoder.cross_attention'] == labels['rows encoder.attention'] == read
    assert labels['rows decoder.attention'] == labels['columns decoder.attention'] == fed
    S, M = len(read), len(made)
    shapes = {'encoder-attention': (2, 2, S, S), 'decoder-attention': (2, 2, M, M),
              'decoder-cross_attention': (2, 2, M, S)}  # fmt: skip
    assert {kind: each.shape for kind, each in weights.items()} == shapes
    for each in weights.values():
        np.testing.assert_allclose(each.sum(axis=-1), 1, atol=1e-6)
    assert np.triu(weights['encoder-attention'], 1).max() > 0  # an encoder sees both sides
    np.testing.assert_array_equal(np.triu(weights['decoder-attention'], 1), 0)


def test_a_shift_reads_a_word_where_it_is_fed(translating, french, capsys):
    task, params, source = french
    assert task.config.model.alignment_shift == task.model.alignment_shift == 1
    assert cli.main(['translate', f'--workdir={translating}', SENTENCES[0]]) == 0
    path = re.search(r'\S+\.npz', capsys.readouterr().err)
    assert path is not None
    weights, rows, _ = heatmap.load_alignment(path[0])
    (made,) = task.translator.translate(params, source[:1], 1)
    assert len(rows) > 2 and rows == task.vocabularies[1].pieces(made.target[:-1])
    np.testing.assert_array_equal(weights, made.weights[1:])
    forced = jax.jit(task.model.attention_maps)(params, np.array(source[:1]), np.array([[BOS, *made.target[:-1]]]))
    heads = np.asarray(forced['decoder/cross_attention'])[0, 1]  # of layer 2, which the experiment chooses
    np.testing.assert_allclose(made.weights, heads.mean(axis=0), atol=1e-5)


def test_beams(translating, french):
    task, params, source = french
    model = task.model
    use = Translator(model, (12,), 4, beams=3, length_penalty=1.0)
    for ids, made in zip(source, use.translate(params, source), strict=True):
        assert made.weights.shape == (len(made.target), len(ids))
        np.testing.assert_allclose(made.weights.sum(axis=1), 1, atol=1e-5)

    @jax.jit
    def both(padded):
        state = model.init_state(params, padded, 8)
        step = partial(model.decode_step, params, 8)
        one = beam_search(step, state, jnp.full(3, BOS), beams=1, max_tokens=8, eos_id=EOS)
        return one.tokens[:, 0], greedy_search(step, state, 3, bos_id=BOS, eos_id=EOS, max_tokens=8).tokens

    padded = np.array([[*ids, *[0] * (12 - len(ids))] for ids in source])
    np.testing.assert_array_equal(*both(padded))


def test_the_alignment_is_read_off_another_layer_when_told_to(translating, capsys):
    def drawn(*flags):
        assert cli.main(['translate', f'--workdir={translating}', *flags, SENTENCES[0]]) == 0
        return heatmap.load_alignment(re.search(r'\S+\.npz', capsys.readouterr().err)[0])

    chosen, one = drawn(), drawn('--layer=1')
    assert chosen[1] == one[1] and np.abs(chosen[0] - one[0]).max() > 1e-4
    np.testing.assert_array_equal(drawn('--layer=2', '--shifted')[0], chosen[0])
    assert cli.main(['translate', f'--workdir={translating}', '--layer=0', SENTENCES[0]]) == 2
    assert 'alignment_layer is 0; expected 1 or more' in capsys.readouterr().err
    with pytest.raises(UserError, match='a recurrent model has one attention'):
        create_task(tiny_grammar_config()).read_at(1, False)


@pytest.mark.parametrize('changes, message', [
    ({'model__positions': 'learned', 'model__context': 20}, 'model.context is 20 with learned positions; expected at'),
    ({'model__mixer': 'gru'}, "model.mixer is 'gru'; an encoder sees both sides"),
    ({'model__alignment_layer': 3}, 'model.alignment_layer is 3; expected 1 to 2'),
    ({'model__alignment_shift': 2}, 'model.alignment_shift is 2; expected 0 to 1'),
    ({'decode__beams': 0}, 'decode.beams is 0; expected 1'),
    ({'decode__length_penalty': -1.0}, 'decode.length_penalty is -1.0; expected 0 or more'),
    ({'optimizer__b2': 1.0}, 'optimizer.b2 is 1.0'),
    ({'seed': 2**64}, 'seed is 18446744073709551616; expected 0 to 4294967295'),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        run.train_run(tiny_transformer_config(**changes), tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


def test_a_source_beyond_learned_positions_is_refused():
    model = make_sequence2sequence_model(TranslatorConfig(positions='learned', context=48), 20, 20)
    params = jax.eval_shape(model.init, jax.random.key(0))
    with pytest.raises(UserError, match='of 30 tokens needs room for 88; the model has 48 learned positions'):
        Translator(model, (20,), 2).translate(params, [[5] * 29 + [EOS]])


def test_a_shared_vocabulary_gives_both_languages_the_same_ids(tmp_path):
    task = create_task(tiny_transformer_config(data__shared='true', model__shared_embedding='true'))
    assert 'embed_source' not in jax.eval_shape(task.init, jax.random.key(0))
    task.save(tmp_path)
    source, target = pairs.load_vocabularies(tmp_path)
    assert source.tokens == target.tokens and (source.language, target.language) == ('en', 'fr')
    assert {'cat', 'chat'} <= {token.strip('▁') for token in source.tokens}

