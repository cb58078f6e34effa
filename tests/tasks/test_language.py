"""The language task on a small text: data, loss, training, evaluation, invalid configs."""

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


def test_labels_are_the_next_tokens(tmp_path):
    task = create_task(tiny_language_config(tmp_path))
    task.save(tmp_path)
    vocabulary = corpus.load_text_tokenizer(tmp_path)
    batch = task.batch(0)
    assert {name: array.shape for name, array in batch.items()} == {'tokens': (4, T), 'labels': (4, T)}
    np.testing.assert_array_equal(batch['tokens'][:, 1:], batch['labels'][:, :-1])
    for tokens, labels in zip(batch['tokens'], batch['labels'], strict=True):
        assert decode_ids(vocabulary, [*tokens, labels[-1]]) in TEXT[: int(0.9 * len(TEXT))]


def test_text_is_split_as_in_nanogpt(tmp_path, shared):
    data = create_task(tiny_language_config(tmp_path)).config.data
    end = int(len(TEXT) * 0.9)
    assert [corpus.read_texts(data, split, 0)[0].text for split in ('train', 'valid')] == [TEXT[:end], TEXT[end:]]
    data = ShakespeareData(folder=str(shared('tinyshakespeare')))
    lengths = [len(corpus.read_texts(data, split, 0)[0].text) for split in ('train', 'valid')]
    assert lengths == [1_003_854, 111_540]  # the numbers that nanoGPT's prepare.py prints


@pytest.mark.parametrize('documents', ['', 'lines'])
def test_rows_of_a_batch_equal_those_of_the_whole_batch(tmp_path, documents):
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


def test_first_loss_is_that_of_a_uniform_distribution(tmp_path):
    task = create_task(tiny_language_config(tmp_path))
    params = jax.jit(task.init, compiler_options=QUICK)(jax.random.key(0))
    sums = jax.jit(task.loss, compiler_options=QUICK)(params, task.batch(0), jax.random.key(0))
    assert float(sums.total / sums.weight) == pytest.approx(math.log(len(set(TEXT))), abs=0.02)


@pytest.mark.slow
def test_initial_parameters_have_the_configured_standard_deviation(tmp_path):
    def kernels(**changes):
        init = jax.jit(
            create_task(tiny_language_config(tmp_path, model__width=64, **changes)).init, compiler_options=QUICK
        )
        mlp = init(jax.random.key(0))['stack']['block_0']['mlp']
        return [float(np.std(mlp[name]['kernel'])) for name in ('up', 'down')]

    assert kernels(model__init=0.3) == pytest.approx([0.3, 0.3 / math.sqrt(2)], rel=0.03)  # divided by sqrt(2 L)
    assert kernels(model__init=0, model__scaled_init='false') == pytest.approx([1 / 8, 1 / 16], rel=0.03)


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
"""(changes, changes of the config whose loss must differ)."""

EXPERTS = {'model__experts': 4}
CHANGES += [
    (EXPERTS | {name: value}, EXPERTS) for name, value in (
        ('model__experts_per_token', 1), ('model__capacity_factor', 0.5), ('model__shared_expert', 'true'),
        ('model__load_balance', 1.0), ('model__router_z', 1.0),
    )
]  # fmt: skip


@pytest.fixture(scope='module')
def loss_of(tmp_path_factory):
    """Function from config changes to the first loss, which is computed once for each set of changes."""
    losses = {}

    def cached_first_loss(changes):
        key = tuple(sorted(changes.items()))
        if key not in losses:
            folder = tmp_path_factory.mktemp('changed')
            losses[key] = first_loss(tiny_language_config(folder, **changes))
        return losses[key]

    return cached_first_loss


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ('changes', 'others'), CHANGES, ids=['-'.join(f'{k}={v}'.removeprefix('model__') for k, v in c.items())
                                         for c, _ in CHANGES],
)  # fmt: skip
def test_every_field_changes_the_first_loss(loss_of, changes, others):
    loss, other_loss = loss_of(changes), loss_of(others)
    assert math.isfinite(loss) and abs(loss - other_loss) > 1e-5


def test_remat_does_not_change_the_first_loss(loss_of):
    assert loss_of({'model__remat': 'full'}) == pytest.approx(loss_of({}), abs=1e-6)


@pytest.fixture(scope='module')
def packed(tmp_path_factory):
    """A task of packed documents with experts, and its compiled loss of a batch with fixed parameters."""
    folder = tmp_path_factory.mktemp('packed')
    task = create_task(
        tiny_language_config(folder, data__documents='lines', model__context=64, model__init=0.3, **EXPERTS)
    )
    loss = jax.jit(task.loss, compiler_options=QUICK)
    return task, partial(loss, task.init(jax.random.key(0)), rng=jax.random.key(1))


@pytest.mark.slow
def test_no_label_crosses_a_document_boundary(packed):
    task, _ = packed
    batch = task.batch(0)
    segments, labels, tokens = batch['segments'], batch['labels'], batch['tokens']
    last = segments != np.pad(segments[:, 1:], ((0, 0), (0, 1)))
    np.testing.assert_array_equal(labels == IGNORE_LABEL, last | (segments == 0))
    np.testing.assert_array_equal(labels[:, :-1][~last[:, :-1] & (segments[:, :-1] > 0)],
                                  tokens[:, 1:][~last[:, :-1] & (segments[:, :-1] > 0)])  # fmt: skip
    assert segments.max() > 1 and (segments == 0).any()


def single_document_batch(batch, row, segment):
    """Return a batch with one document of `batch` at the start of the first row; the rest is padding."""
    in_document = batch['segments'][row] == segment
    single = {'tokens': np.zeros_like(batch['tokens']), 'labels': np.full_like(batch['labels'], IGNORE_LABEL),
              'segments': np.zeros_like(batch['segments'])}  # fmt: skip
    for name, values in single.items():
        values[0, : in_document.sum()] = 1 if name == 'segments' else batch[name][row][in_document]
    return single


@pytest.mark.slow
def test_loss_of_packed_documents_is_the_sum_of_the_losses_of_each(packed):
    task, loss = packed
    batch = task.batch(0)
    documents = [(row, segment) for row in range(4) for segment in range(1, batch['segments'][row].max() + 1)]
    single_sums = [loss(single_document_batch(batch, row, segment)) for row, segment in documents]
    assert len(single_sums) > 6
    packed_sums = loss(batch)
    assert int(packed_sums.weight) == sum(int(sums.weight) for sums in single_sums)
    nll = lambda sums: float(sums.extras['nll'])
    assert nll(packed_sums) == pytest.approx(sum(map(nll, single_sums)), rel=1e-5)


def test_experts_ignore_padding(packed):
    task, loss = packed
    batch = task.batch(0)
    other_padding = batch | {'tokens': np.where(batch['segments'] == 0, 7, batch['tokens'])}
    assert (other_padding['tokens'] != batch['tokens']).any()
    jax.tree.map(np.testing.assert_array_equal, loss(batch), loss(other_padding))


def test_expert_losses_are_added_to_the_training_loss(packed):
    task, loss = packed
    sums = loss(task.batch(0))
    means = {name: float(value / sums.weight) for name, value in sums.extras.items()}
    assert set(means) == {'nll', 'experts_load_balance', 'experts_z', 'experts_dropped'}
    auxiliary_loss = 0.01 * means['experts_load_balance'] + 0.001 * means['experts_z']  # there is one layer
    assert float(sums.total / sums.weight) == pytest.approx(means['nll'] + auxiliary_loss, rel=1e-6)
    assert auxiliary_loss > 1e-3 and means['experts_dropped'] == 0


@pytest.mark.slow
def test_metrics_have_the_statistics_of_experts(documents_run):
    records = [record for record in metrics.read_metrics(documents_run) if record['split'] == 'train']
    assert len(records) == 3
    for record in records:
        # E sum f p: 1 if balanced, E = 2 if one expert gets all tokens
        assert 0.9 < record['experts_load_balance'] < 2.1
        assert record['loss'] > record['nll'] and record['experts_z'] > 0


@pytest.mark.slow
def test_interrupted_run_continues_as_if_it_was_not(stream_run, monkeypatch):
    config, interrupted_run = run.load_task(stream_run).config, stream_run.parent / 'broken'
    batch = LanguageTask.batch

    def interrupting_batch(task, step, rows=slice(None)):
        if step == 7:
            raise KeyboardInterrupt
        return batch(task, step, rows)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LanguageTask, 'batch', interrupting_batch)
        run.train_run(config, interrupted_run)
    assert max(record['step'] for record in metrics.read_metrics(interrupted_run)) in (6, 7)
    run.train_run(config, interrupted_run)
    lines = lambda workdir: [json.dumps(r) for r in metrics.read_metrics(workdir) if r['split'] != 'speed']
    assert lines(stream_run) == lines(interrupted_run)
    expected, resumed = newest_of(config, stream_run), newest_of(config, interrupted_run)
    assert expected.step == resumed.step == 20 and expected.progress == resumed.progress
    jax.tree.map(np.testing.assert_array_equal, expected, resumed)


# Scores


@pytest.mark.slow
def test_a_token_changes_only_its_own_and_later_logits(language_model):
    *_, vocabulary, logits = language_model
    ids = vocabulary.encode(TEXT[:T])
    for t in (0, 7, T - 1):
        changed = ids.copy()
        changed[t] = (ids[t] + 1) % vocabulary.size
        differs = (logits(ids) != logits(changed)).any(axis=1)
        assert not differs[:t].any() and differs[t:].all()


@pytest.mark.slow
def test_evaluation_counts_every_token_once(language_model, stream_run, monkeypatch):
    _, params, vocabulary, logits = language_model
    text = TEXT[int(len(TEXT) * 0.9) :]
    ids, nll = vocabulary.encode(text), []
    for start in range(0, len(ids) - 1, T):
        labels = ids[start + 1 : start + 1 + T]
        rows = logits(ids[start : start + len(labels)]).astype(np.float64)
        probabilities = np.exp(rows) / np.exp(rows).sum(axis=1, keepdims=True)
        nll += [-math.log(probabilities[i, label]) for i, label in enumerate(labels)]
    assert len(nll) == len(text) - 1
    for tokens in (1, 3 * T, 10_000):
        monkeypatch.setattr('attnlab.tasks.language.task.EVALUATION_TOKENS', tokens)
        scores = run.load_task(stream_run).evaluate(params, 'valid')
        assert scores['tokens'] == len(nll)
        assert scores['loss'] == pytest.approx(np.mean(nll), rel=1e-5)
        assert scores['bits_per_character'] == pytest.approx(sum(nll) / math.log(2) / len(text), rel=1e-5)
        assert scores['perplexity'] == pytest.approx(math.exp(np.mean(nll)), rel=1e-5)


def test_eval_writes_scores_and_page(stream_run, capsys):
    assert cli.main(['eval', f'--workdir={stream_run}']) == 0
    out = capsys.readouterr().out
    scores = json.loads((stream_run / 'scores-valid.json').read_text())
    best = min(
        (record for record in metrics.read_metrics(stream_run) if record['split'] == 'valid'),
        key=lambda record: record['loss'],
    )
    assert (scores['split'], scores['step']) == ('valid', best['step'])
    assert scores['loss'] == pytest.approx(best['loss'], rel=1e-6)
    page = Path(out.splitlines()[-1].removeprefix('page: '))
    assert page.is_relative_to(stream_run) and f'{scores["perplexity"]:.2f}'[:4] in page.read_text()
    assert cli.main(['eval', f'--workdir={stream_run}', '--split=test']) == 2
    assert capsys.readouterr().err == "attnlab: split is 'test'; expected one of train, valid\n"


@pytest.mark.slow
def test_evaluation_scores_every_token_and_the_end_of_each_document(documents_run):
    task, params, _ = run.load_run(documents_run)
    scores = task.evaluate(params, 'valid')
    lines = TEXT[int(len(TEXT) * 0.9) :].strip('\n').split('\n')
    assert scores['tokens'] == sum(len(line) + 1 for line in lines)
    bits = scores['loss'] * scores['tokens'] / math.log(2) / sum(map(len, lines))
    assert scores['bits_per_character'] == pytest.approx(bits)


# Invalid configs

INVALID = [
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
    ('data.name=grammar', "data.documents is ''; expected 'lines'"),
    ('data.vocabulary=words', "data.vocabulary is 'words'; expected 'characters', 'bytes' or 'subwords'"),
    ('data.vocabulary=subwords', 'data.vocabulary_size is 0 for subwords; expected a size'),
    ('data.vocabulary_size=9', 'data.vocabulary_size is 9 for characters; expected a size for subwords and 0'),
    ('seed=4294967296', 'seed is 4294967296; expected 0 to 4294967295'),
    ('task=languages', "task is 'languages'; expected 'align', 'language' or 'vision'"),
]


@pytest.mark.parametrize(('overrides', 'message'), INVALID, ids=[overrides for overrides, _ in INVALID])
def test_invalid_values_are_refused_before_anything_is_written(
    tmp_path, capsys, monkeypatch, as_used, overrides, message
):
    workdir = tmp_path / 'new'
    monkeypatch.setattr(corpus, 'read_texts', None)  # fails the test if text is read
    argv = ['train', '--config=experiments/language/shakespeare_char.py', f'--workdir={workdir}']
    assert cli.main([*argv, *(f'--config.{override}' for override in overrides.split())]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f'attnlab: {message}') and error.count('\n') == 1
    assert not workdir.exists()


def test_values_that_do_not_fit_the_text_are_refused_before_anything_is_written(tmp_path):
    for changes, message in (
        ({'data__documents': 'zz'}, "documents by 'zz'; expected lines, paragraphs or a string that separates them"),
        ({'model__context': 5000}, r'model.context is 5000; expected at most \d+, the tokens of the training text'),
        ({'data__share': 0.0001}, 'characters cannot be divided at 0.0001 into two texts'),
    ):
        with pytest.raises(UserError, match=message):
            run.train_run(tiny_language_config(tmp_path, **changes), tmp_path / 'new')
    assert not (tmp_path / 'new').exists()


@pytest.mark.parametrize('documents', ['', 'lines'])
def test_context_longer_than_the_text_is_refused_before_memory_is_allocated(tmp_path, documents):
    config = tiny_language_config(tmp_path, data__documents=documents, model__context=10**9)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=r'model.context is 1000000000; expected at most \d+, the tokens of the train'):
        create_task(config).batch(0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # in kilobytes: 1 GiB
