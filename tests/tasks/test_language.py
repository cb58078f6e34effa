"""The language task on a tiny text, and what one does with its runs."""

import json
import math
import resource
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from attnlab import cli
from attnlab.configs import ShakespeareData
from attnlab.data.rows import IGNORE_LABEL
from attnlab.errors import UserError
from attnlab.tasks import create_task
from attnlab.tasks.language import corpus
from attnlab.tasks.language.task import LanguageTask
from attnlab.train import metrics, run
from tests.quick import QUICK
from tests.tiny import LINES, T, decode_ids, random_parameter, tiny_language_config
from tests.train.helpers import newest_of

TEXT = '\n'.join(LINES) + '\n'


# Training


def test_labels_are_the_tokens_one_later(tmp_path):
    task = create_task(tiny_language_config(tmp_path))
    task.save(tmp_path)
    vocabulary = corpus.load_vocabulary(tmp_path)
    batch = task.batch(0)
    assert {name: each.shape for name, each in batch.items()} == {'tokens': (4, T), 'labels': (4, T)}
    np.testing.assert_array_equal(batch['tokens'][:, 1:], batch['labels'][:, :-1])
    for tokens, labels in zip(batch['tokens'], batch['labels'], strict=True):
        assert decode_ids(vocabulary, [*tokens, labels[-1]]) in TEXT[: int(0.9 * len(TEXT))]


def test_a_text_is_cut_as_nanogpt_cuts_it(tmp_path, shared):
    data = create_task(tiny_language_config(tmp_path)).config.data
    at = int(len(TEXT) * 0.9)
    assert [corpus.read_texts(data, split, 0)[0].text for split in ('train', 'valid')] == [TEXT[:at], TEXT[at:]]
    data = ShakespeareData(folder=str(shared('tinyshakespeare')))
    lengths = [len(corpus.read_texts(data, split, 0)[0].text) for split in ('train', 'valid')]
    assert lengths == [1_003_854, 111_540]  # which its prepare.py prints


@pytest.mark.parametrize('documents', ['', 'lines'])
def test_a_part_of_a_batch_is_its_rows(tmp_path, documents):
    task = create_task(tiny_language_config(tmp_path, data__documents=documents))
    whole, part = task.batch(2), task.batch(2, slice(1, 3))
    assert whole.keys() == part.keys()
    for name, x in part.items():
        np.testing.assert_array_equal(x, whole[name][1:3])


def first_loss(config):
    task = create_task(config)
    params = jax.tree_util.tree_map_with_path(random_parameter, jax.eval_shape(task.init, jax.random.key(0)))
    sums = jax.jit(task.loss, compiler_options=QUICK)(params, task.batch(0), jax.random.key(0))
    return float(sums.total / sums.weight)


def test_an_untrained_model_knows_nothing(tmp_path):
    task = create_task(tiny_language_config(tmp_path))
    params = jax.jit(task.init, compiler_options=QUICK)(jax.random.key(0))
    sums = jax.jit(task.loss, compiler_options=QUICK)(params, task.batch(0), jax.random.key(0))
    assert float(sums.total / sums.weight) == pytest.approx(math.log(len(set(TEXT))), abs=0.02)


def test_parameters_start_as_wide_as_asked(tmp_path):
    def kernels(**changes):
        init = jax.jit(
            create_task(tiny_language_config(tmp_path, model__width=64, **changes)).init, compiler_options=QUICK
        )
        mlp = init(jax.random.key(0))['stack']['block_0']['mlp']
        return [float(np.std(mlp[name]['kernel'])) for name in ('up', 'down')]

    assert kernels(model__init=0.3) == pytest.approx([0.3, 0.3 / math.sqrt(2)], rel=0.03)  # by sqrt(2 L)
    assert kernels(model__init=0, model__scaled_init='false') == pytest.approx([1 / 8, 1 / 16], rel=0.03)


# Each with the one that it is to differ from.
CHANGES = [
    ({'train__label_smoothing': 0.2}, {}),
    *[({f'model__{name}': 0.5}, {}) for name in ('dropout', 'attention_dropout', 'layer_drop')],
    *[({'model__positions': name}, {}) for name in ('sinusoidal', 'rotary', 'alibi', 'relative', 'none')],
    ({'model__positions': 'rotary', 'model__rotary_base': 10}, {'model__positions': 'rotary'}),
    *[({'model__mixer': name}, {}) for name in ('convolution', 'gru')],
    ({'model__mixer': 'convolution', 'model__kernel_size': 2}, {'model__mixer': 'convolution'}),
    ({'model__qk_norm': 'rms'}, {}), ({'model__order': 'post'}, {}), ({'model__mlp': 'swiglu'}, {}),
    ({'model__kv_heads': 1}, {}), ({'model__head_width': 4}, {}), ({'model__sinks': 'true'}, {}),
    ({'model__window': 3}, {}), ({'model__norm': 'rms'}, {}), ({'model__parallel': 'true'}, {}),
    ({'model__mlp_width': 24}, {}), ({'model__use_bias': 'true'}, {}), ({'model__tied': 'false'}, {}),
    ({'model__dtype': 'bfloat16'}, {}), ({'model__experts': 4}, {}),
]  # fmt: skip
EXPERTS = {'model__experts': 4}
CHANGES += [
    (EXPERTS | {name: value}, EXPERTS) for name, value in (
        ('model__experts_per_token', 1), ('model__capacity_factor', 0.5), ('model__shared_expert', 'true'),
        ('model__load_balance', 1.0), ('model__router_z', 1.0),
    )
]  # fmt: skip


@pytest.fixture(scope='module')
def loss_of(tmp_path_factory):
    found = {}

    def of(changes):
        key = tuple(sorted(changes.items()))
        if key not in found:
            folder = tmp_path_factory.mktemp('changed')
            found[key] = first_loss(tiny_language_config(folder, **changes))
        return found[key]

    return of


@pytest.mark.parametrize(
    ('changes', 'others'), CHANGES, ids=['-'.join(f'{k}={v}'.removeprefix('model__') for k, v in c.items())
                                         for c, _ in CHANGES],
)  # fmt: skip
def test_every_field_changes_the_first_loss(loss_of, changes, others):
    found, other = loss_of(changes), loss_of(others)
    assert math.isfinite(found) and abs(found - other) > 1e-5


def test_what_only_saves_memory_does_not(loss_of):
    assert loss_of({'model__remat': 'full'}) == pytest.approx(loss_of({}), abs=1e-6)


@pytest.fixture(scope='module')
def packed(tmp_path_factory):
    """A task of documents with experts, its parameters and jitted loss."""
    folder = tmp_path_factory.mktemp('packed')
    task = create_task(
        tiny_language_config(folder, data__documents='lines', model__context=64, model__init=0.3, **EXPERTS)
    )
    loss = jax.jit(task.loss, compiler_options=QUICK)
    return task, partial(loss, task.init(jax.random.key(0)), rng=jax.random.key(1))


def test_no_label_goes_across_a_boundary(packed):
    task, _ = packed
    batch = task.batch(0)
    segments, labels, tokens = batch['segments'], batch['labels'], batch['tokens']
    last = segments != np.pad(segments[:, 1:], ((0, 0), (0, 1)))
    np.testing.assert_array_equal(labels == IGNORE_LABEL, last | (segments == 0))
    np.testing.assert_array_equal(labels[:, :-1][~last[:, :-1] & (segments[:, :-1] > 0)],
                                  tokens[:, 1:][~last[:, :-1] & (segments[:, :-1] > 0)])  # fmt: skip
    assert segments.max() > 1 and (segments == 0).any()


def alone(batch, row, segment):
    """A batch of one document at the start of its first row, and what is left of it: padding."""
    here = batch['segments'][row] == segment
    made = {'tokens': np.zeros_like(batch['tokens']), 'labels': np.full_like(batch['labels'], IGNORE_LABEL),
            'segments': np.zeros_like(batch['segments'])}  # fmt: skip
    for name, values in made.items():
        values[0, : here.sum()] = 1 if name == 'segments' else batch[name][row][here]
    return made


def test_a_packed_document_is_as_it_is_alone(packed):
    task, loss = packed
    batch = task.batch(0)
    every = [(row, segment) for row in range(4) for segment in range(1, batch['segments'][row].max() + 1)]
    sums = [loss(alone(batch, *one)) for one in every]
    assert len(sums) > 6
    together = loss(batch)
    assert int(together.weight) == sum(int(each.weight) for each in sums)
    nll = lambda each: float(each.extras['nll'])
    assert nll(together) == pytest.approx(sum(map(nll, sums)), rel=1e-5)


def test_experts_do_not_count_padding(packed):
    task, loss = packed
    batch = task.batch(0)
    other = batch | {'tokens': np.where(batch['segments'] == 0, 7, batch['tokens'])}
    assert (other['tokens'] != batch['tokens']).any()
    jax.tree.map(np.testing.assert_array_equal, loss(batch), loss(other))


def test_experts_add_their_losses_to_the_training_loss(packed):
    task, loss = packed
    sums = loss(task.batch(0))
    each = {name: float(value / sums.weight) for name, value in sums.extras.items()}
    assert set(each) == {'nll', 'experts_load_balance', 'experts_z', 'experts_dropped'}
    added = 0.01 * each['experts_load_balance'] + 0.001 * each['experts_z']  # of the one layer
    assert float(sums.total / sums.weight) == pytest.approx(each['nll'] + added, rel=1e-6)
    assert added > 1e-3 and each['experts_dropped'] == 0


def test_what_experts_say_is_in_the_metrics(documents):
    records = [record for record in metrics.read_metrics(documents) if record['split'] == 'train']
    assert len(records) == 3
    for record in records:
        assert 0.9 < record['experts_load_balance'] < 2.1  # E sum f p: 1 where balanced, E = 2 where one serves all
        assert record['loss'] > record['nll'] and record['experts_z'] > 0


def test_twenty_steps_are_seven_and_thirteen(stream, monkeypatch):
    config, broken, batch = run.load_task(stream).config, stream.parent / 'broken', LanguageTask.batch

    def stopping(task, step, rows=slice(None)):
        if step == 7:
            raise KeyboardInterrupt
        return batch(task, step, rows)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LanguageTask, 'batch', stopping)
        run.train_run(config, broken)
    assert max(record['step'] for record in metrics.read_metrics(broken)) in (6, 7)
    run.train_run(config, broken)
    lines = lambda workdir: [json.dumps(each) for each in metrics.read_metrics(workdir) if each['split'] != 'speed']
    assert lines(stream) == lines(broken)
    left, right = newest_of(config, stream), newest_of(config, broken)
    assert left.step == right.step == 20 and left.progress == right.progress
    jax.tree.map(np.testing.assert_array_equal, left, right)


# Scores


def test_a_token_changes_what_comes_behind_it_alone(speaker):
    *_, vocabulary, logits = speaker
    ids = vocabulary.encode(TEXT[:T])
    for t in (0, 7, T - 1):
        changed = ids.copy()
        changed[t] = (ids[t] + 1) % vocabulary.size
        differs = (logits(ids) != logits(changed)).any(axis=1)
        assert not differs[:t].any() and differs[t:].all()


def test_evaluation_counts_every_token_once(speaker, stream, monkeypatch):
    _, params, vocabulary, logits = speaker
    text = TEXT[int(len(TEXT) * 0.9) :]
    ids, nll = vocabulary.encode(text), []
    for start in range(0, len(ids) - 1, T):
        labels = ids[start + 1 : start + 1 + T]
        rows = logits(ids[start : start + len(labels)]).astype(np.float64)
        shares = np.exp(rows) / np.exp(rows).sum(axis=1, keepdims=True)
        nll += [-math.log(shares[i, label]) for i, label in enumerate(labels)]
    assert len(nll) == len(text) - 1
    for tokens in (1, 3 * T, 10_000):
        monkeypatch.setattr('attnlab.tasks.language.task.EVALUATION_TOKENS', tokens)
        scores = run.load_task(stream).evaluate(params, 'valid')
        assert scores['tokens'] == len(nll)
        assert scores['loss'] == pytest.approx(np.mean(nll), rel=1e-5)
        assert scores['bits_per_character'] == pytest.approx(sum(nll) / math.log(2) / len(text), rel=1e-5)
        assert scores['perplexity'] == pytest.approx(math.exp(np.mean(nll)), rel=1e-5)


def test_eval_writes_scores_and_page(stream, capsys):
    assert cli.main(['eval', f'--workdir={stream}']) == 0
    out = capsys.readouterr().out
    scores = json.loads((stream / 'scores-valid.json').read_text())
    best = min(
        (each for each in metrics.read_metrics(stream) if each['split'] == 'valid'), key=lambda each: each['loss']
    )
    assert (scores['split'], scores['step']) == ('valid', best['step'])
    assert scores['loss'] == pytest.approx(best['loss'], rel=1e-6)
    page = Path(out.splitlines()[-1].removeprefix('page: '))
    assert page.is_relative_to(stream) and f'{scores["perplexity"]:.2f}'[:4] in page.read_text()
    assert cli.main(['eval', f'--workdir={stream}', '--split=test']) == 2
    assert capsys.readouterr().err == "attnlab: split is 'test'; expected one of train, valid\n"


def test_every_token_of_a_document_and_its_end_are_scored(documents):
    task, params, _ = run.load_run(documents)
    scores = task.evaluate(params, 'valid')
    lines = TEXT[int(len(TEXT) * 0.9) :].strip('\n').split('\n')
    assert scores['tokens'] == sum(len(line) + 1 for line in lines)
    bits = scores['loss'] * scores['tokens'] / math.log(2) / sum(map(len, lines))
    assert scores['bits_per_character'] == pytest.approx(bits)


# What cannot be

BAD = [
    ('model.name=gpt', "model.name is 'gpt'; expected 'language'"),
    ('model.heads=3', 'model: queries have width 128; expected a multiple of 3 heads, or head_width'),
    ('model.kv_heads=3', 'model: kv_heads is 3; expected a divisor of heads, 4'),
    ('model.head_width=5 model.positions=rotary', 'model: x has heads of width 5; expected an even number'),
    ('model.mlp=foo', "model.mlp is 'foo'; expected 'relu', 'gelu', 'gelu_tanh', 'swiglu', 'geglu' or 'reglu'"),
    ('model.implementation=foo', "model.implementation is 'foo'; expected 'auto', 'ring'"),
    ('model.positions=foo', "model.positions is 'foo'; expected 'learned', 'sinusoidal'"),
    ('model.positions=alibi model.mixer=gru', "model: positions is 'alibi', which acts in attention, but"),
    ('model.experts=2 model.experts_per_token=3',
     'model: experts_per_token is 3; expected 1 to 2, the number of experts'),
    ('model.parallel=true model.order=post', "model: parallel blocks need order 'pre'"),
    ('model.layers=0', 'model.layers is 0; expected 1 or more'),
    ('data.name=text', "data.name is 'text'; expected 'shakespeare', 'file' or 'grammar'"),
    ('data.name=file', 'data.path is empty; expected a path: --config.data.path=FILE'),
    ('data.name=grammar', "data.documents is ''; a sentence of the grammar is one, expected 'lines'"),
    ('data.vocabulary=words', "data.vocabulary is 'words'; expected 'characters', 'bytes' or 'subwords'"),
    ('data.vocabulary=subwords', 'data.vocabulary_size is 0 for subwords; expected a size'),
    ('data.vocabulary_size=9', 'data.vocabulary_size is 9 for characters; expected a size for subwords and 0'),
    ('seed=4294967296', 'seed is 4294967296; expected 0 to 4294967295'),
    ('task=languages', "task is 'languages'; expected 'align', 'language' or 'vision'"),
]


@pytest.mark.parametrize(('overrides', 'message'), BAD, ids=[overrides for overrides, _ in BAD])
def test_values_that_nothing_can_be_made_of_leave_no_trace(tmp_path, capsys, monkeypatch, as_used, overrides, message):
    workdir = tmp_path / 'new'
    monkeypatch.setattr(corpus, 'read_texts', None)  # and no text is read
    argv = ['train', '--config=experiments/language/shakespeare_char.py', f'--workdir={workdir}']
    assert cli.main([*argv, *(f'--config.{each}' for each in overrides.split())]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f'attnlab: {message}') and error.count('\n') == 1
    assert not workdir.exists()


def test_what_only_the_text_can_tell_leaves_no_trace_either(tmp_path):
    for changes, message in (
        ({'data__documents': 'zz'}, "documents by 'zz'; expected lines, paragraphs or a string that stands between"),
        ({'model__context': 5000}, r'model.context is 5000; expected at most \d+, the tokens of the training text'),
        ({'data__share': 0.0001}, 'characters cannot be divided at 0.0001 into two texts'),
    ):
        with pytest.raises(UserError, match=message):
            run.train_run(tiny_language_config(tmp_path, **changes), tmp_path / 'new')
    assert not (tmp_path / 'new').exists()


@pytest.mark.parametrize('documents', ['', 'lines'])
def test_a_context_longer_than_the_text_is_refused_before_rows_of_it_are_made(tmp_path, documents):
    config = tiny_language_config(tmp_path, data__documents=documents, model__context=10**9)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=r'model.context is 1000000000; expected at most \d+, the tokens of the train'):
        create_task(config).batch(0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # kilobytes: 1 GiB
