"""A small Transformer that translates: its alignments, its attention maps, its beam search."""

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
from attnlab.tasks.align import corpus
from attnlab.tasks.align.translator import Translator
from attnlab.train import run
from tests.tiny import hash_run_files, tiny_grammar_config, tiny_transformer_config

SENTENCES = ['the black cat sleeps.', 'Marie sings.', 'he does not see the small house.']


@pytest.fixture(scope='module')
def loaded(transformer_run):
    """Task, parameters, and the source ids of `SENTENCES`."""
    task, params, _ = run.load_run(transformer_run)
    return task, params, corpus.encode_sentences(SENTENCES, task.vocabularies[0])


@pytest.mark.slow
def test_evaluation_scores_the_alignment_of_every_layer(transformer_run, loaded):
    _, scores = run.evaluate_run(transformer_run)
    by_layer = scores['aer_by_layer']
    chosen = by_layer[1]  # the config chooses layer 2
    assert (chosen['emit'], chosen['shifted']) == (scores['aer_emit'], scores['aer_shifted'])
    task, params, _ = loaded
    test = corpus.read_pairs(task.config.data, 'test', task.config.seed)
    weights = task.translator.score_translations(params, *corpus.encode_pairs(test, task.vocabularies))[2]
    for layer, row in enumerate(by_layer):
        for name, shift in (('emit', 0), ('shifted', 1)):  # every token is a word, except the last, EOS
            links = [
                {(int(layers[layer, t + shift, :-1].argmax()), t) for t in range(layers.shape[1] - 1)}
                for layers in weights
            ]
            assert row[name] == pytest.approx(alignment_error_rate(links, test.links).aer), (layer, name)
    assert [row['layer'] for row in by_layer] == [1, 2] and by_layer[0]['emit'] != by_layer[1]['emit']


@pytest.mark.slow
def test_attend_draws_every_attention_of_a_translation(transformer_run, loaded, capsys):
    task, _, source = loaded
    before = hash_run_files(transformer_run)
    assert cli.main(['attend', f'--workdir={transformer_run}', '--layer=2', SENTENCES[0]]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    kinds = ('encoder-attention', 'decoder-attention', 'decoder-cross_attention')
    assert {path.name for path in written} == {'weights.npz', *(f'{kind}-layer2.png' for kind in kinds)}
    assert hash_run_files(transformer_run) == before
    with np.load(written[0], allow_pickle=False) as arrays:
        weights = {kind: arrays[kind.replace('-', '.')] for kind in kinds}
        labels = {name: arrays[name].tolist() for name in arrays.files if ' ' in name}
    words, target_labels = [*tokenise(SENTENCES[0]), '</s>'], labels['rows decoder.cross_attention']
    pieces = task.vocabularies[0].pieces(source[0])
    source_labels = [f'{word} <unk>' if piece == '<unk>' else piece for word, piece in zip(words, pieces, strict=True)]
    input_labels = ['<s>', *target_labels[:-1]]
    assert labels['columns decoder.cross_attention'] == labels['rows encoder.attention'] == source_labels
    assert labels['rows decoder.attention'] == labels['columns decoder.attention'] == input_labels
    S, T = len(source_labels), len(target_labels)
    shapes = {'encoder-attention': (2, 2, S, S), 'decoder-attention': (2, 2, T, T),
              'decoder-cross_attention': (2, 2, T, S)}  # fmt: skip
    assert {kind: matrices.shape for kind, matrices in weights.items()} == shapes
    for matrices in weights.values():
        np.testing.assert_allclose(matrices.sum(axis=-1), 1, atol=1e-6)
    assert np.triu(weights['encoder-attention'], 1).max() > 0  # an encoder attends in both directions
    np.testing.assert_array_equal(np.triu(weights['decoder-attention'], 1), 0)


@pytest.mark.slow
def test_shifted_alignment_has_the_weights_of_the_next_step(transformer_run, loaded, capsys):
    task, params, source = loaded
    assert task.config.model.alignment_shift == task.model.alignment_shift == 1
    assert cli.main(['translate', f'--workdir={transformer_run}', SENTENCES[0]]) == 0
    path = re.search(r'\S+\.npz', capsys.readouterr().err)
    assert path is not None
    weights, rows, _ = heatmap.load_alignment(path[0])
    (translation,) = task.translator.translate(params, source[:1], 1)
    assert len(rows) > 2 and rows == task.vocabularies[1].pieces(translation.target[:-1])
    np.testing.assert_array_equal(weights, translation.weights[1:])
    inputs = np.array([[BOS, *translation.target[:-1]]])
    maps = jax.jit(task.model.attention_maps)(params, np.array(source[:1]), inputs)
    heads = np.asarray(maps['decoder/cross_attention'])[0, 1]  # of layer 2, which the config chooses
    np.testing.assert_allclose(translation.weights, heads.mean(axis=0), atol=1e-5)


@pytest.mark.slow
def test_beam_search_gives_weights_and_one_beam_is_greedy(transformer_run, loaded):
    task, params, source = loaded
    model = task.model
    translator = Translator(model, (12,), 4, beams=3, length_penalty=1.0)
    for ids, translation in zip(source, translator.translate(params, source), strict=True):
        assert translation.weights.shape == (len(translation.target), len(ids))
        np.testing.assert_allclose(translation.weights.sum(axis=1), 1, atol=1e-5)

    @jax.jit
    def one_beam_and_greedy(padded):
        state = model.init_state(params, padded, 8)
        step = partial(model.decode_step, params, 8)
        hypotheses = beam_search(step, state, jnp.full(3, BOS), beams=1, max_tokens=8, eos_id=EOS)
        return hypotheses.tokens[:, 0], greedy_search(step, state, 3, bos_id=BOS, eos_id=EOS, max_tokens=8).tokens

    padded = np.array([[*ids, *[0] * (12 - len(ids))] for ids in source])
    np.testing.assert_array_equal(*one_beam_and_greedy(padded))


@pytest.mark.slow
def test_layer_and_shift_flags_choose_the_alignment(transformer_run, capsys):
    def translated_alignment(*flags):
        assert cli.main(['translate', f'--workdir={transformer_run}', *flags, SENTENCES[0]]) == 0
        return heatmap.load_alignment(re.search(r'\S+\.npz', capsys.readouterr().err)[0])

    (weights, rows, _), (other_weights, other_rows, _) = translated_alignment(), translated_alignment('--layer=1')
    assert rows == other_rows and np.abs(weights - other_weights).max() > 1e-4
    np.testing.assert_array_equal(translated_alignment('--layer=2', '--shifted')[0], weights)
    assert cli.main(['translate', f'--workdir={transformer_run}', '--layer=0', SENTENCES[0]]) == 2
    assert 'alignment_layer is 0; expected 1 or more' in capsys.readouterr().err
    with pytest.raises(UserError, match='a recurrent model has only one attention'):
        create_task(tiny_grammar_config()).with_alignment_at(1, False)


@pytest.mark.parametrize('changes, message', [
    ({'model__positions': 'learned', 'model__context': 20}, 'model.context is 20 with learned positions; expected at'),
    ({'model__mixer': 'gru'}, "model.mixer is 'gru'; expected 'attention'"),
    ({'model__alignment_layer': 3}, 'model.alignment_layer is 3; expected 1 to layers, 2'),
    ({'model__alignment_shift': 2}, 'model.alignment_shift is 2; expected 0 to 1'),
    ({'decode__beams': 0}, 'decode.beams is 0; expected 1'),
    ({'decode__length_penalty': -1.0}, 'decode.length_penalty is -1.0; expected 0 or more'),
    ({'optimizer__b2': 1.0}, 'optimizer.b2 is 1.0'),
    ({'seed': 2**64}, 'seed is 18446744073709551616; expected 0 to 4294967295'),
])  # fmt: skip
def test_invalid_configs_are_refused_before_anything_is_written(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        run.train_run(tiny_transformer_config(**changes), tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


def test_source_longer_than_learned_positions_is_refused():
    model = make_sequence2sequence_model(TranslatorConfig(positions='learned', context=48), 20, 20)
    params = jax.eval_shape(model.init, jax.random.key(0))
    with pytest.raises(UserError, match='of 30 tokens needs 88 positions; expected at most 48, the learned positions'):
        Translator(model, (20,), 2).translate(params, [[5] * 29 + [EOS]])


def test_shared_vocabulary_gives_both_languages_the_same_ids(tmp_path):
    task = create_task(tiny_transformer_config(data__shared='true', model__shared_embedding='true'))
    assert 'embed_source' not in jax.eval_shape(task.init, jax.random.key(0))
    task.save(tmp_path)
    source, target = corpus.load_vocabularies(tmp_path)
    assert source.tokens == target.tokens and (source.language, target.language) == ('en', 'fr')
    assert {'cat', 'chat'} <= {token.strip('▁') for token in source.tokens}
