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


def test_decoder_inputs_are_the_labels_one_late():
    labels = jnp.array([[7, 8, EOS, 0, 0], [9, EOS, 0, 0, 0]])
    np.testing.assert_array_equal(translator.shift_right(labels), [[BOS, 7, 8, 0, 0], [BOS, 9, 0, 0, 0]])


def test_batches_hold_every_sentence_with_its_end(tmp_path):
    task = create_task(tiny_grammar_config())
    seen = []
    for step in range(8):
        batch = task.batch(step)
        for name, part in task.batch(step, slice(3, 9)).items():
            np.testing.assert_array_equal(part, batch[name][3:9])
        assert batch['source'].shape == batch['target'].shape == (16, batch['source'].shape[1])
        seen += [tuple(row[row > 0]) for row in batch['target'] if row.any()]
    assert len(seen) == 128 and all(row[-1] == EOS and row.count(EOS) == 1 for row in seen)
    task.save(tmp_path)
    assert (
        corpus.load_vocabularies(tmp_path)
        == task.vocabularies
        == create_task(tiny_grammar_config(), tmp_path).vocabularies
    )
    texts = sorted(task.vocabularies[1].decode(row) for row in seen)
    assert texts == sorted(corpus.read_pairs(task.config.data, 'train', task.config.seed).target)


def test_long_sentences_are_cut_before_their_end_and_counted(caplog):
    vocabulary = create_task(tiny_grammar_config()).vocabularies[0]
    long, short = corpus.encode_sentences(
        ['the cat sees the dog and the cat sees the dog.', 'the cat sleeps.'], vocabulary, 6
    )
    assert len(long) == 6 and long[-1] == EOS and short[-1] == EOS and len(short) == 5
    assert '1 of 2 en sentences are cut to 6 tokens' in caplog.text


def test_the_loss_of_a_batch_does_not_know_its_width():
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


@pytest.mark.parametrize(
    'change',
    [
        {'model__dropout': '0.5'}, {'train__label_smoothing': '0.2'}, {'model__attention': 'dot'},
        {'model__attention': 'none'}, {'model__cell': 'lstm'}, {'model__bidirectional': 'false'},
        {'model__encoder_layers': '2'}, {'model__reverse_source': 'true'},
    ],
    ids=lambda change: '-'.join(change),
)  # fmt: skip
def test_every_switch_of_the_model_changes_the_first_loss(change):
    assert first_loss(tiny_grammar_config(**change)) != first_loss(tiny_grammar_config())


def test_translations_do_not_depend_on_batch_mates_or_order(tiny):
    task, params, _ = run.load_run(tiny)
    encoded = corpus.encode_sentences(SENTENCES, task.vocabularies[0])
    together = task.translator.translate(params, encoded, 16)
    turned = task.translator.translate(params, encoded[::-1], 16)[::-1]
    alone = [task.translator.translate(params, [ids], 1)[0] for ids in encoded]
    for one, other, third in zip(together, turned, alone, strict=True):
        assert one.target == other.target == third.target
        np.testing.assert_array_equal(one.weights, other.weights)
        np.testing.assert_allclose(one.weights, third.weights, atol=1e-6)


def test_a_source_beyond_all_widths_is_translated_whole(tiny):
    task, params, _ = run.load_run(tiny)
    (ids,) = corpus.encode_sentences([' '.join(['cat'] * 50)], task.vocabularies[0])
    assert task.translator.translate(params, [ids])[0].weights.shape[1] == 51


def test_scores_are_of_the_whole_split_and_come_out_again(tiny):
    split, scores = run.evaluate_run(tiny)
    assert split == 'test' and json.loads((tiny / 'scores-test.json').read_text()) == scores
    assert scores['sentences'] == 24 == sum(row['sentences'] for row in scores['by_length'])
    assert scores['perplexity'] == pytest.approx(math.exp(scores['loss']))
    assert {'aer_emit', 'aer_shifted', 'inversion_emit', 'inversion_shifted', 'exact_match'} <= scores.keys()
    assert 'tok:13a' in scores['bleu_signature'] and 'version' in scores['chrf_signature']
    pairs = corpus.read_pairs(run.load_task(tiny).config.data, 'test', 0)
    found = read_links(tiny / 'samples' / 'test.links')
    assert alignment_error_rate([found[i + 1] for i in range(24)], pairs.links).aer == scores['aer_emit']
    valid = [record for record in metrics.read_metrics(tiny) if record['split'] == 'valid']
    _, again = run.evaluate_run(tiny, 'valid')
    best = max(valid, key=lambda record: record['bleu'])
    assert (again['step'], again['bleu']) == (best['step'], pytest.approx(best['bleu']))
    assert again['loss'] == pytest.approx(best['loss'], rel=1e-6)


def test_samples_are_labelled_with_what_was_produced(tiny):
    run.evaluate_run(tiny, 'test')
    samples = json.loads((tiny / 'samples' / 'test.json').read_text())
    assert len(samples) == 10
    for sample in samples:
        weights = np.array(sample['weights'])
        assert weights.shape == (len(sample['rows']), len(sample['columns']))
        np.testing.assert_allclose(weights.sum(axis=1), 1.0, atol=1e-3)
        typed = [column.removesuffix(' <unk>') for column in sample['columns']]
        assert typed == [*tokenise(normalise(sample['source'], 'en')), '</s>']
        produced = [row for row in sample['rows'] if row != '</s>']
        assert produced == tokenise(sample['output'])


def test_a_split_that_is_not_there_is_refused(tiny, capsys):
    assert cli.main(['eval', f'--workdir={tiny}', '--split=tset']) == 2
    assert "split is 'tset'; expected one of train, valid, test" in capsys.readouterr().err


def test_translate_prints_french_and_leaves_picture_and_array(tiny, capsys):
    assert cli.main(['translate', f'--workdir={tiny}', *SENTENCES[:2]]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert len(lines) == 2  # into a pipe goes the French alone
    pictures = [line.split('  ')[0] for line in err.splitlines() if '.png' in line]
    assert len(pictures) == 2
    for line, picture in zip(lines, pictures, strict=True):
        weights, rows, columns = heatmap.load_alignment(picture.removesuffix('.png') + '.npz')
        assert weights.shape == (len(rows), len(columns)) and columns[-1] == '</s>'
        assert [row for row in rows if row != '</s>'] == tokenise(line)
        assert Path(picture).read_bytes().startswith(b'\x89PNG\r\n')


def test_words_that_the_model_does_not_know_are_marked_and_named(tiny, capsys, caplog):
    known = corpus.load_vocabularies(tiny)[0].tokens
    assert {'the', 'cat', '.'} < set(known) and not {'le', 'café'} & set(known)
    assert cli.main(['translate', f'--workdir={tiny}', 'le café the cat.', 'le cat.']) == 0
    screen = capsys.readouterr().err
    assert '╭ le <unk>\n' in screen and '╭ café <unk>\n' in screen and '╭ the\n' in screen
    assert [line for line in caplog.messages if 'café' in line] == [
        'unknown words, not in the training text of the model: le, café'
    ]
    picture = next(line for line in screen.splitlines() if '.png' in line).split('  ')[0]
    columns = heatmap.load_alignment(picture.removesuffix('.png') + '.npz')[2]
    assert columns == ['le <unk>', 'café <unk>', 'the', 'cat', '.', '</s>']
    assert cli.main(['attend', f'--workdir={tiny}', 'le cat.']) == 0
    arrays = np.load(capsys.readouterr().out.splitlines()[0])
    assert arrays['columns decoder.cross_attention'].tolist() == ['le <unk>', 'cat', '.', '</s>']


@pytest.mark.parametrize('command', ['translate', 'attend'])
def test_a_sentence_too_long_is_refused_before_it_is_read(tiny, capsys, command):
    before = sorted((tiny / 'figures').glob('*'))
    assert cli.main([command, f'--workdir={tiny}', 'the cat.', ' '.join(['cat'] * 5000)]) == 2
    assert capsys.readouterr().err == 'attnlab: sentence 2 has 5001 tokens with its end; expected at most 512\n'
    assert sorted((tiny / 'figures').glob('*')) == before


@pytest.mark.parametrize('kind', ['words', 'subwords'])
def test_the_words_of_a_cut_sentence_stand_at_its_ids(kind):
    known = vocabulary.build_vocabulary(kind, SENTENCES, 290, 'en')
    (ids,) = corpus.encode_sentences(
        ['the black 日本 cat sees him. she does not.'], known, 20 if kind == 'subwords' else 6
    )
    words = pictures.label_source_words('the black 日本 cat sees him. she does not.', ids, known)
    assert words[:3] == ['the', 'black', '日本 <unk>'] and words[-1] == '</s>'
    assert len(words) == len(known.words(ids)) < 11


def test_sentences_of_a_split_are_cut_where_those_of_a_user_are_refused():
    assert [corpus.max_sentence_length(GrammarPairs(widths=(12, last))) for last in (20, 700)] == [512, 700]


@pytest.mark.slow
def test_the_model_without_attention_translates_and_scores(tmp_path, capsys):
    run.train_run(tiny_grammar_config('fixed', train__duration='2 steps'), tmp_path / 'fixed')
    assert cli.main(['eval', f'--workdir={tmp_path / "fixed"}']) == 0
    assert cli.main(['translate', f'--workdir={tmp_path / "fixed"}', 'Marie sings.']) == 0
    assert 'aer' not in json.loads((tmp_path / 'fixed' / 'scores-test.json').read_text())
    assert not (tmp_path / 'fixed' / 'figures').exists()


BAD = [
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


@pytest.mark.parametrize(('override', 'message'), BAD, ids=[override for override, _ in BAD])
def test_values_that_nothing_can_be_made_of_leave_no_trace(tmp_path, capsys, monkeypatch, override, message):
    workdir = tmp_path / 'new'
    monkeypatch.setattr(corpus, 'read_pairs', None)  # and no data is read
    argv = ['train', '--config=experiments/align/grammar_gru.py', f'--workdir={workdir}', f'--config.{override}']
    assert cli.main(argv) == 2
    error = capsys.readouterr().err
    assert message in error and error.count('\n') == 1
    assert not workdir.exists()


def test_another_config_does_not_go_into_the_same_directory(tiny, capsys):
    with pytest.raises(UserError, match='model.hidden is 16 here and 12 there'):
        run.train_run(tiny_grammar_config(model__hidden='16'), tiny)


def test_a_run_without_checkpoints_says_so_and_stays_as_it_is(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / 'run', ignore=shutil.ignore_patterns('checkpoints'))
    before = sorted(tmp_path.rglob('*'))
    argv = [sys.executable, '-m', 'attnlab', 'eval', f'--workdir={tmp_path / "run"}']
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, '')
    assert done.stderr == f'attnlab: {tmp_path / "run"} has no checkpoint yet: train it first\n'
    assert sorted(tmp_path.rglob('*')) == before


def test_a_finished_run_is_not_trained_again(tiny):
    before = (tiny / 'metrics.jsonl').read_text()
    assert run.train_run(tiny_grammar_config(), tiny)['step'] == 20
    assert (tiny / 'metrics.jsonl').read_text() == before


def test_links_of_known_weights():
    # le chat noir . </s> over the black cat . </s>
    weights = np.eye(5)[[0, 2, 1, 3, 4]]
    rows = [(word, i, i + 1) for i, word in enumerate(['le', 'chat', 'noir', '.', '</s>'])]
    columns = [(word, i, i + 1) for i, word in enumerate(['the', 'black', 'cat', '.', '</s>'])]
    found = alignment.extract_links(weights, rows, columns, shift=0)
    assert found == {(0, 0), (2, 1), (1, 2), (3, 3)}
    assert alignment.count_reversals(found) == 1
    late = np.vstack([np.eye(5)[4], weights[:-1]])  # each word's row stands one step later
    assert alignment.extract_links(late, rows, columns, shift=1) == found


def test_words_of_sub_words_add_up():
    weights = np.array([[0.2, 0.3, 0.5, 0.0], [0.6, 0.1, 0.3, 0.0], [0.0, 0.0, 0.0, 1.0]])
    rows, columns = [('noir', 0, 2), ('</s>', 2, 3)], [('black', 0, 2), ('cat', 2, 3), ('</s>', 3, 4)]
    joined = alignment.join_subwords(weights, rows, columns)
    np.testing.assert_allclose(joined, [[0.6, 0.4, 0.0], [0.0, 0.0, 1.0]])


@pytest.mark.slow
def test_files_of_ones_own(tmp_path, capsys):
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
    assert cli.main([*argv, *(f'--config.{each}' for each in small + files)]) == 0
    assert cli.main(['eval', f'--workdir={tmp_path}/run']) == 0
    assert '9 sentences' in capsys.readouterr().out
    assert cli.main([*argv[:2], f'--workdir={tmp_path}/x']) == 2
    assert 'a value is required: --config.data.' in capsys.readouterr().err


def test_multi30k_of_a_given_folder(shared):
    folder = shared('multi30k')
    data = create_task(
        configs.load_experiment('experiments/align/multi30k_gru.py', [('data.folder', str(folder))])
    ).config.data
    sizes = {split: len(corpus.read_pairs(data, split, 0).source) for split in corpus.split_names(data)}
    assert sizes == {'train': 29_000, 'valid': 1_014, 'test': 1_000, 'test_2017': 1_000}


def test_words_are_scored_in_lower_case_and_apart():
    outputs = ["L'homme court vite dans la rue.", 'Deux chiens jouent dehors avec lui.']
    references = ["l'homme marche vite dans la rue !", 'deux chiens jouent dehors avec elle.']
    found = scores.score_texts(outputs, references, 'fr')
    apart = [["l' homme court vite dans la rue .", 'deux chiens jouent dehors avec lui .'],
             ["l' homme marche vite dans la rue !", 'deux chiens jouent dehors avec elle .']]  # fmt: skip
    expected = sacrebleu.corpus_bleu(apart[0], [apart[1]], tokenize='none', force=True).score
    assert found['bleu_words'] == pytest.approx(expected) != found['bleu']
    assert 'tok:none' in found['bleu_words_signature'] and 'case:lc' in found['bleu_words_signature']
