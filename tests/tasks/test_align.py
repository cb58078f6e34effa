"""The translation task: batches, loss, evaluation, commands, alignments, scores."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sacrebleu

from attnlab import cli, configs
from attnlab.configs import GrammarPairs
from attnlab.data import vocabulary
from attnlab.data.alignments import alignment_error_rate, read_links
from attnlab.data.text import normalise, tokenise
from attnlab.data.vocabulary import BOS, EOS
from attnlab.errors import UserError
from attnlab.tasks import create_task, heatmap
from attnlab.tasks.align import alignment, corpus, pictures, scores, translator
from attnlab.train import metrics, run
from tests.quick import QUICK
from tests.tiny import tiny_grammar_config

SENTENCES = [
    'the black cat sleeps.', 'she does not see him.', "the teacher's small white house is new.", 'Marie sings.',
]  # fmt: skip


def test_decoder_inputs_are_the_labels_shifted_right():
    labels = jnp.array([[7, 8, EOS, 0, 0], [9, EOS, 0, 0, 0]])
    np.testing.assert_array_equal(translator.shift_right(labels), [[BOS, 7, 8, 0, 0], [BOS, 9, 0, 0, 0]])


def test_batches_have_every_sentence_once_with_its_end(tmp_path):
    task = create_task(tiny_grammar_config())
    targets = []
    for step in range(8):
        batch = task.batch(step)
        for name, part in task.batch(step, slice(3, 9)).items():
            np.testing.assert_array_equal(part, batch[name][3:9])
        assert batch['source'].shape == batch['target'].shape == (16, batch['source'].shape[1])
        targets += [tuple(row[row > 0]) for row in batch['target'] if row.any()]
    assert len(targets) == 128 and all(row[-1] == EOS and row.count(EOS) == 1 for row in targets)
    task.save(tmp_path)
    assert (
        corpus.load_vocabularies(tmp_path)
        == task.vocabularies
        == create_task(tiny_grammar_config(), tmp_path).vocabularies
    )
    texts = sorted(task.vocabularies[1].decode(row) for row in targets)
    assert texts == sorted(corpus.read_pairs(task.config.data, 'train', task.config.seed).target)


def test_long_sentences_are_cut_keep_their_end_and_are_logged(caplog):
    vocabulary = create_task(tiny_grammar_config()).vocabularies[0]
    long, short = corpus.encode_sentences(
        ['the cat sees the dog and the cat sees the dog.', 'the cat sleeps.'], vocabulary, 6
    )
    assert len(long) == 6 and long[-1] == EOS and short[-1] == EOS and len(short) == 5
    assert '1 of 2 en sentences are cut to 6 tokens' in caplog.text


@pytest.mark.slow
def test_loss_and_gradient_do_not_depend_on_padding():
    task = create_task(tiny_grammar_config(model__dropout='0.0', train__label_smoothing='0.1'))
    params = task.init(jax.random.key(0))
    batch = task.batch(0)
    wide = {name: np.pad(x, ((0, 3), (0, 7))) for name, x in batch.items()}
    gradient = jax.value_and_grad(lambda p, b: task.loss(p, b, jax.random.key(1)).total)
    gradient = jax.jit(gradient, compiler_options=QUICK)
    (loss, grads), (loss_wide, grads_wide) = gradient(params, batch), gradient(params, wide)
    np.testing.assert_allclose(loss, loss_wide, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), grads, grads_wide)


def first_loss(config):
    task = create_task(config)
    sums = jax.jit(task.loss, compiler_options=QUICK)(task.init(jax.random.key(0)), task.batch(0), jax.random.key(1))
    return float(sums.total / sums.weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    'change',
    [
        {'model__dropout': '0.5'}, {'train__label_smoothing': '0.2'}, {'model__attention': 'dot'},
        {'model__attention': 'none'}, {'model__cell': 'lstm'}, {'model__bidirectional': 'false'},
        {'model__encoder_layers': '2'}, {'model__reverse_source': 'true'},
    ],
    ids=lambda change: '-'.join(change),
)  # fmt: skip
def test_every_model_field_changes_the_first_loss(change):
    assert first_loss(tiny_grammar_config(**change)) != first_loss(tiny_grammar_config())


@pytest.mark.slow
def test_translations_do_not_depend_on_batch_or_order(recurrent_run):
    task, params, _ = run.load_run(recurrent_run)
    encoded = corpus.encode_sentences(SENTENCES, task.vocabularies[0])
    together = task.translator.translate(params, encoded, 16)
    reversed_order = task.translator.translate(params, encoded[::-1], 16)[::-1]
    alone = [task.translator.translate(params, [ids], 1)[0] for ids in encoded]
    for in_batch, in_reversed, single in zip(together, reversed_order, alone, strict=True):
        assert in_batch.target == in_reversed.target == single.target
        np.testing.assert_array_equal(in_batch.weights, in_reversed.weights)
        np.testing.assert_allclose(in_batch.weights, single.weights, atol=1e-6)


@pytest.mark.slow
def test_source_longer_than_all_widths_is_translated_whole(recurrent_run):
    task, params, _ = run.load_run(recurrent_run)
    (ids,) = corpus.encode_sentences([' '.join(['cat'] * 50)], task.vocabularies[0])
    assert task.translator.translate(params, [ids])[0].weights.shape[1] == 51


@pytest.mark.slow
def test_evaluation_scores_the_whole_split_and_is_reproducible(recurrent_run):
    split, scores = run.evaluate_run(recurrent_run)
    assert split == 'test' and json.loads((recurrent_run / 'scores-test.json').read_text()) == scores
    assert scores['sentences'] == 24 == sum(row['sentences'] for row in scores['by_length'])
    assert scores['perplexity'] == pytest.approx(math.exp(scores['loss']))
    assert {'aer_emit', 'aer_shifted', 'inversion_emit', 'inversion_shifted', 'exact_match'} <= scores.keys()
    assert 'tok:13a' in scores['bleu_signature'] and 'version' in scores['chrf_signature']
    pairs = corpus.read_pairs(run.load_task(recurrent_run).config.data, 'test', 0)
    links = read_links(recurrent_run / 'samples' / 'test.links')
    assert alignment_error_rate([links[i + 1] for i in range(24)], pairs.links).aer == scores['aer_emit']
    valid_records = [record for record in metrics.read_metrics(recurrent_run) if record['split'] == 'valid']
    _, valid_scores = run.evaluate_run(recurrent_run, 'valid')
    best = max(valid_records, key=lambda record: record['bleu'])
    assert (valid_scores['step'], valid_scores['bleu']) == (best['step'], pytest.approx(best['bleu']))
    assert valid_scores['loss'] == pytest.approx(best['loss'], rel=1e-6)


def test_samples_have_source_and_output_as_labels(recurrent_run):
    run.evaluate_run(recurrent_run, 'test')
    samples = json.loads((recurrent_run / 'samples' / 'test.json').read_text())
    assert len(samples) == 10
    for sample in samples:
        weights = np.array(sample['weights'])
        assert weights.shape == (len(sample['rows']), len(sample['columns']))
        np.testing.assert_allclose(weights.sum(axis=1), 1.0, atol=1e-3)
        words = [column.removesuffix(' <unk>') for column in sample['columns']]
        assert words == [*tokenise(normalise(sample['source'], 'en')), '</s>']
        output_words = [row for row in sample['rows'] if row != '</s>']
        assert output_words == tokenise(sample['output'])


def test_unknown_split_is_refused(recurrent_run, capsys):
    assert cli.main(['eval', f'--workdir={recurrent_run}', '--split=tset']) == 2
    assert "split is 'tset'; expected one of train, valid, test" in capsys.readouterr().err


@pytest.mark.slow
def test_translate_prints_french_and_writes_picture_and_array(recurrent_run, capsys):
    assert cli.main(['translate', f'--workdir={recurrent_run}', *SENTENCES[:2]]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert len(lines) == 2  # a pipe gets only the French
    pictures = [line.split('  ')[0] for line in err.splitlines() if '.png' in line]
    assert len(pictures) == 2
    for line, picture in zip(lines, pictures, strict=True):
        weights, rows, columns = heatmap.load_alignment(picture.removesuffix('.png') + '.npz')
        assert weights.shape == (len(rows), len(columns)) and columns[-1] == '</s>'
        assert [row for row in rows if row != '</s>'] == tokenise(line)
        assert Path(picture).read_bytes().startswith(b'\x89PNG\r\n')


@pytest.mark.slow
def test_unknown_words_are_marked_and_logged(recurrent_run, capsys, caplog):
    tokens = set(corpus.load_vocabularies(recurrent_run)[0].tokens)
    assert {'the', 'cat', '.'} < tokens and not {'le', 'café'} & tokens
    assert cli.main(['translate', f'--workdir={recurrent_run}', 'le café the cat.', 'le cat.']) == 0
    screen = capsys.readouterr().err
    assert '╭ le <unk>\n' in screen and '╭ café <unk>\n' in screen and '╭ the\n' in screen
    assert [line for line in caplog.messages if 'café' in line] == [
        'unknown words, not in the training text of the model: le, café'
    ]
    picture = next(line for line in screen.splitlines() if '.png' in line).split('  ')[0]
    columns = heatmap.load_alignment(picture.removesuffix('.png') + '.npz')[2]
    assert columns == ['le <unk>', 'café <unk>', 'the', 'cat', '.', '</s>']
    assert cli.main(['attend', f'--workdir={recurrent_run}', 'le cat.']) == 0
    arrays = np.load(capsys.readouterr().out.splitlines()[0])
    assert arrays['columns decoder.cross_attention'].tolist() == ['le <unk>', 'cat', '.', '</s>']


@pytest.mark.parametrize('command', ['translate', 'attend'])
def test_too_long_sentence_is_refused_before_anything_is_written(recurrent_run, capsys, command):
    before = sorted((recurrent_run / 'figures').glob('*'))
    assert cli.main([command, f'--workdir={recurrent_run}', 'the cat.', ' '.join(['cat'] * 5000)]) == 2
    message = 'sentence 2 has 5001 tokens, the end of sentence included; expected at most 512'
    assert capsys.readouterr().err == f'attnlab: {message}\n'
    assert sorted((recurrent_run / 'figures').glob('*')) == before


@pytest.mark.parametrize('kind', ['words', 'subwords'])
def test_labels_of_a_cut_sentence_fit_its_ids(kind):
    source_vocabulary = vocabulary.build_vocabulary(kind, SENTENCES, 290, 'en')
    (ids,) = corpus.encode_sentences(
        ['the black 日本 cat sees him. she does not.'], source_vocabulary, 20 if kind == 'subwords' else 6
    )
    words = pictures.label_source_words('the black 日本 cat sees him. she does not.', ids, source_vocabulary)
    assert words[:3] == ['the', 'black', '日本 <unk>'] and words[-1] == '</s>'
    assert len(words) == len(source_vocabulary.words(ids)) < 11


def test_max_sentence_length_is_512_or_the_last_width():
    assert [corpus.max_sentence_length(GrammarPairs(widths=(12, last))) for last in (20, 700)] == [512, 700]


@pytest.mark.slow
def test_model_without_attention_translates_and_evaluates(tmp_path, capsys):
    run.train_run(tiny_grammar_config('fixed', train__duration='2 steps'), tmp_path / 'fixed')
    assert cli.main(['eval', f'--workdir={tmp_path / "fixed"}']) == 0
    assert cli.main(['translate', f'--workdir={tmp_path / "fixed"}', 'Marie sings.']) == 0
    assert 'aer' not in json.loads((tmp_path / 'fixed' / 'scores-test.json').read_text())
    assert not (tmp_path / 'fixed' / 'figures').exists()


INVALID = [
    ('model.cell=gruu', "model.cell is 'gruu'; expected 'gru' or 'lstm'"),
    ('model.attention=bahdanau', 'model.attention'),
    ('model.hidden=0', 'model.hidden is 0'),
    ('model.dropout=1.0', 'model.dropout is 1.0'),
    ('data.name=gramar', "data.name is 'gramar'"),
    ('data.vocabulary=word', "data.vocabulary is 'word'; expected 'words' or 'subwords'"),
    ('data.vocabulary_size=3', 'data.vocabulary_size is 3'),
    ('data.widths=20,12', 'data.widths is (20, 12)'),
    ('data.train_examples=0', 'data.train_examples is 0'),
    ('data.test_examples=-1', 'data.test_examples is -1'),
    ('optimizer.name=adamw', "optimizer.name is 'adamw'"),
    ('optimizer.schedule=cos', "optimizer.schedule is 'cos'"),
    ('optimizer.clip=-1', 'optimizer.clip is -1'),
    ('train.duration=5', "train.duration is '5'"),
    ('train.label_smoothing=1', 'train.label_smoothing is 1.0'),
    ('task=aline', "task is 'aline'"),
    ('seed=-1', 'seed is -1'),
]


@pytest.mark.parametrize(('override', 'message'), INVALID, ids=[override for override, _ in INVALID])
def test_invalid_values_are_refused_before_anything_is_written(tmp_path, capsys, monkeypatch, override, message):
    workdir = tmp_path / 'new'
    monkeypatch.setattr(corpus, 'read_pairs', None)  # fails the test if data is read
    argv = ['train', '--config=experiments/align/grammar_gru.py', f'--workdir={workdir}', f'--config.{override}']
    assert cli.main(argv) == 2
    error = capsys.readouterr().err
    assert message in error and error.count('\n') == 1
    assert not workdir.exists()


def test_another_config_in_the_same_directory_is_refused(recurrent_run, capsys):
    with pytest.raises(UserError, match='model.hidden is 16 here and 12 there'):
        run.train_run(tiny_grammar_config(model__hidden='16'), recurrent_run)


@pytest.mark.slow
def test_run_without_checkpoints_is_refused_and_unchanged(recurrent_run, tmp_path):
    shutil.copytree(recurrent_run, tmp_path / 'run', ignore=shutil.ignore_patterns('checkpoints'))
    before = sorted(tmp_path.rglob('*'))
    argv = [sys.executable, '-m', 'attnlab', 'eval', f'--workdir={tmp_path / "run"}']
    process = subprocess.run(argv, capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (2, '')
    assert process.stderr == f'attnlab: {tmp_path / "run"} has no checkpoint yet: train it first\n'
    assert sorted(tmp_path.rglob('*')) == before


def test_finished_run_is_not_trained_again(recurrent_run):
    before = (recurrent_run / 'metrics.jsonl').read_text()
    assert run.train_run(tiny_grammar_config(), recurrent_run)['step'] == 20
    assert (recurrent_run / 'metrics.jsonl').read_text() == before


def test_links_are_at_the_largest_weights():
    # le chat noir . </s> over the black cat . </s>
    weights = np.eye(5)[[0, 2, 1, 3, 4]]
    rows = [(word, i, i + 1) for i, word in enumerate(['le', 'chat', 'noir', '.', '</s>'])]
    columns = [(word, i, i + 1) for i, word in enumerate(['the', 'black', 'cat', '.', '</s>'])]
    links = alignment.extract_links(weights, rows, columns, shift=0)
    assert links == {(0, 0), (2, 1), (1, 2), (3, 3)}
    assert alignment.count_reversals(links) == 1
    shifted = np.vstack([np.eye(5)[4], weights[:-1]])  # the row of each word is one step later
    assert alignment.extract_links(shifted, rows, columns, shift=1) == links


def test_weights_are_summed_over_source_and_averaged_over_produced_subwords():
    weights = np.array([[0.2, 0.3, 0.5, 0.0], [0.6, 0.1, 0.3, 0.0], [0.0, 0.0, 0.0, 1.0]])
    rows, columns = [('noir', 0, 2), ('</s>', 2, 3)], [('black', 0, 2), ('cat', 2, 3), ('</s>', 3, 4)]
    joined = alignment.join_subwords(weights, rows, columns)
    np.testing.assert_allclose(joined, [[0.6, 0.4, 0.0], [0.0, 0.0, 1.0]])


@pytest.mark.slow
def test_training_on_own_files(tmp_path, capsys):
    pairs = corpus.read_pairs(GrammarPairs(train_examples=128), 'train', 0)
    for split in ('train', 'valid', 'test'):
        (tmp_path / f'{split}.en').write_text('\n'.join(pairs.source[:40]) + '\n')
        (tmp_path / f'{split}.fr').write_text('\n'.join(pairs.target[:40]) + '\n')
    table = zip(pairs.source[:9], pairs.target[:9], strict=True)
    (tmp_path / 'test.tsv').write_text(''.join(f'{source}\t{target}\n' for source, target in table))
    small = ['model.embedding=8', 'model.hidden=12', 'train.batch_size=16', 'train.duration=2 steps']
    small += ['train.eval_every=2 steps', 'data.vocabulary_size=400', 'data.widths=48']
    files = [f'data.train={tmp_path}/train', f'data.valid={tmp_path}/valid', f'data.test={tmp_path}/test.tsv']
    argv = ['train', '--config=experiments/align/files_gru.py', f'--workdir={tmp_path}/run']
    assert cli.main([*argv, *(f'--config.{override}' for override in small + files)]) == 0
    assert cli.main(['eval', f'--workdir={tmp_path}/run']) == 0
    assert '9 sentences' in capsys.readouterr().out
    assert cli.main([*argv[:2], f'--workdir={tmp_path}/x']) == 2
    assert 'a value is required: --config.data.' in capsys.readouterr().err


def test_multi30k_splits_have_their_published_sizes(shared):
    folder = shared('multi30k')
    data = create_task(
        configs.load_experiment('experiments/align/multi30k_gru.py', [('data.folder', str(folder))])
    ).config.data
    sizes = {split: len(corpus.read_pairs(data, split, 0).source) for split in corpus.split_names(data)}
    assert sizes == {'train': 29_000, 'valid': 1_014, 'test': 1_000, 'test_2017': 1_000}


def test_bleu_of_words_is_lower_cased_and_tokenised():
    outputs = ["L'homme court vite dans la rue.", 'Deux chiens jouent dehors avec lui.']
    references = ["l'homme marche vite dans la rue !", 'deux chiens jouent dehors avec elle.']
    result = scores.score_texts(outputs, references, 'fr')
    tokenised = [["l' homme court vite dans la rue .", 'deux chiens jouent dehors avec lui .'],
                 ["l' homme marche vite dans la rue !", 'deux chiens jouent dehors avec elle .']]  # fmt: skip
    expected = sacrebleu.corpus_bleu(tokenised[0], [tokenised[1]], tokenize='none', force=True).score
    assert result['bleu_words'] == pytest.approx(expected) != result['bleu']
    assert 'tok:none' in result['bleu_words_signature'] and 'case:lc' in result['bleu_words_signature']
