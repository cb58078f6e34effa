"""Use of a language model: generating text, drawing attention."""

from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from attnlab import cli, environment
from attnlab.data import tokenizers
from attnlab.data.corpus import SourceText
from attnlab.errors import UserError
from attnlab.tasks.language import generation
from attnlab.train import run
from tests.tiny import LINES, T, decode_ids, hash_run_files

# Generation


@pytest.fixture(scope='module')
def generate(language_model):
    """`generate_texts` for the prompt 'the cat'."""
    model, params, vocabulary, _ = language_model
    return partial(generation.generate_texts, model, params, vocabulary, 'the cat', False)


@pytest.mark.slow
def test_greedy_text_equals_that_of_a_plain_loop(language_model, generate, caplog):
    caplog.set_level('INFO')
    *_, vocabulary, logits = language_model
    text = window = vocabulary.encode('the cat').tolist()
    for _ in range(2 * T):
        window = window if len(window) <= T else window[-T // 2 :]
        token = int(logits(np.array(window))[-1].argmax())
        text, window = [*text, token], [*window, token]
    assert generate(tokens=2 * T, temperature=0.0) == [decode_ids(vocabulary, text)]
    assert len(set(text[-8:])) > 3
    assert caplog.messages == ['the context of 16 tokens is full: generation continues from its last half']
    assert generate(tokens=2 * T, top_k=1, seed=5) == [decode_ids(vocabulary, text)]


@pytest.mark.slow
def test_samples_do_not_depend_on_their_number(generate):
    many = generate(tokens=30, samples=3)
    assert generate(tokens=30) == many[:1]
    assert len(set(many)) == 3 and {len(text) for text in many} == {len('the cat') + 30}
    assert generate(tokens=30, seed=1) != many[:1]


@pytest.mark.slow
def test_generation_of_many_tokens_compiles_once(generate, monkeypatch):
    samplers, build_sampler = [], generation.build_sampler
    monkeypatch.setattr(
        generation, 'build_sampler', lambda *args: samplers.append(build_sampler(*args)) or samplers[-1]
    )
    (text,) = generate(tokens=200)
    assert len(text) == 207 and [sampler._cache_size() for sampler in samplers] == [1]


@pytest.mark.slow
def test_each_sample_ends_at_the_end_of_its_document(documents_run):
    task, params, _ = run.load_run(documents_run)
    generate = partial(generation.generate_texts, task.model, params, task.vocabulary, documents=True, tokens=60)
    many = generate('', samples=8, seed=1)
    few = generate('', samples=4, seed=1)
    assert few == many[:4]
    lengths = [*map(len, many)]
    # One sample exceeds the context; another, which is not among the first four, ends in the second half of it.
    assert max(lengths[:4]) > T + 9 and all(length < T // 2 or length > T for length in lengths[:4])
    assert any(T // 2 < length < T - 2 for length in lengths[4:]) and max(lengths) < 60
    assert generate('Jim', samples=2)[1].startswith('Jim')


def test_unknown_words_of_a_prompt_are_logged(caplog):
    vocabulary = tokenizers.build_tokenizer(
        'subwords', [SourceText(line, 'lines') for line in LINES], 300, documents=True
    )
    generation.encode_prompt(vocabulary, 'the cät sees\n日本 the cat', True)
    assert caplog.messages == ['unknown words, not in the training text of the model: cät, 日本']


@pytest.mark.parametrize('documents', [True, False])
def test_prompt_of_invisible_characters_is_refused_as_empty(documents):
    vocabulary = tokenizers.build_tokenizer(
        'subwords', [SourceText(line, 'lines') for line in LINES], 300, documents=True
    )
    with pytest.raises(UserError, match='the prompt is empty'):
        generation.encode_prompt(vocabulary, '\u200b', documents)


REFUSED = [
    ([], 'the prompt is empty; expected some text to continue'),
    (['--prompt=the cät'], "prompt, line 1: character 'ä' (U+00E4) is not one of the 23 of the training text"),
    (['--prompt=x', '--tokens=0'], 'tokens is 0; expected at least 1'),
    (['--prompt=the', '--tokens=0'], 'tokens is 0; expected at least 1'),
    (['--prompt=the', '--samples=0'], 'samples is 0; expected at least 1'),
    (['--prompt=the', '--seed=-1'], 'seed is -1; expected'),
    (['--prompt=the', '--seed=99999999999999999999'], 'seed is 99999999999999999999; expected'),
    (['--prompt=the', '--tokens=1000000000000'], '1 samples of 1000000000003 tokens take about 4e+13 bytes; this'),
    (['--prompt=the', '--samples=1000000000'], '1000000000 samples of 203 tokens take about'),
    (['--prompt=the', '--temperature=-1'], 'temperature is -1.0; expected a finite number, at least 0'),
    (['--prompt=the', '--temperature=nan'], "--temperature expects a finite number, got 'nan'"),
    (['--prompt=the', '--top_k=0'], 'top_k is 0; expected a whole number, at least 1'),
    (['--prompt=the', '--top_p=2'], 'top_p is 2.0; expected 0 < top_p <= 1'),
]


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(('flags', 'message'), REFUSED, ids=[' '.join(flags) for flags, _ in REFUSED])
def test_generate_refuses_invalid_arguments_in_one_line(stream_run, capsys, flags, message):
    assert cli.main(['generate', f'--workdir={stream_run}', *flags]) == 2
    out, error = capsys.readouterr()
    assert out == '' and error.startswith(f'attnlab: {message}') and error.count('\n') == 1


def test_generate_prints_each_sample(stream_run, capsys):
    flags = ['--prompt=the cat', '--tokens=5', '--samples=2', '--temperature=0']
    assert cli.main(['generate', f'--workdir={stream_run}', *flags]) == 0
    text = capsys.readouterr().out
    assert len(text) == 2 * (7 + 5 + 1) and text[:13] == text[13:] and text.startswith('the cat')


# Attention


@pytest.mark.slow
def test_attend_draws_each_layer_and_leaves_the_run_unchanged(stream_run, language_model, capsys):
    *_, vocabulary, _ = language_model
    before, text = hash_run_files(stream_run), 'the cat fears'
    assert cli.main(['attend', f'--workdir={stream_run}', text]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in written] == ['weights.npz', 'attention-layer1.png']
    assert len({path.parent for path in written}) == 1 and written[0].parent.parent == stream_run / 'figures'
    assert written[1].read_bytes().startswith(b'\x89PNG\r\n') and hash_run_files(stream_run) == before
    with np.load(written[0], allow_pickle=False) as arrays:
        weights = arrays['attention']
        pieces = list(text.replace(' ', vocabulary.pieces(vocabulary.encode(' '))[0]))
        assert arrays['rows attention'].tolist() == pieces
        assert arrays['columns attention'].tolist() == pieces
    assert weights.shape == (1, 2, len(text), len(text))
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-6)
    np.testing.assert_array_equal(np.triu(weights, 1), 0)
    assert weights[0, :, 1:].min(axis=-1, where=np.tri(len(text), dtype=bool)[1:], initial=1).min() > 0


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(('argv', 'message'), [
    (['--layer=2', 'the cat'], '--layer is 2; expected 1 to 1, the layers of '),
    (['--layer=0', 'the cat'], '--layer is 0; expected 1 to 1, the layers of '),
    (['--head=3', 'the cat'], '--head is 3; expected 1 to 2, the heads of '),
    (['the cat the dog bit'], 'the text has 19 tokens; expected at most 16, the context of the model'),
    (['the cät'], "prompt, line 1: character 'ä'"),
])  # fmt: skip
def test_attend_refuses_before_anything_is_written(stream_run, capsys, argv, message):
    before = sorted(stream_run.rglob('*'))
    assert cli.main(['attend', f'--workdir={stream_run}', *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f'attnlab: {message}') and error.count('\n') == 1
    assert sorted(stream_run.rglob('*')) == before


@pytest.mark.slow
def test_commands_that_the_task_does_not_support_are_refused(stream_run, transformer_run, capsys):
    assert cli.main(['translate', f'--workdir={stream_run}', 'the cat sleeps.']) == 2
    assert capsys.readouterr().err == "attnlab: the task 'language' does not translate\n"
    assert cli.main(['generate', f'--workdir={transformer_run}', '--prompt=the cat']) == 2
    assert capsys.readouterr().err == "attnlab: the task 'align' does not generate\n"


@pytest.mark.slow
def test_texts_larger_than_the_memory_are_refused_before_anything_is_computed(language_model, generate, monkeypatch):
    """On a machine with 16 GB; the parameters are only shapes, so that any computation would fail."""
    model, params, vocabulary, _ = language_model
    shapes = jax.eval_shape(lambda: params)
    monkeypatch.setattr(environment, 'host_memory_bytes', lambda: 16 * 10**9)
    for numbers in (dict(tokens=10**9), dict(samples=10**9, tokens=1), dict(samples=10**5, tokens=10**5)):
        with pytest.raises(UserError, match='samples of .* tokens take about .* bytes; this machine has 1.6e\\+10'):
            generation.generate_texts(model, shapes, vocabulary, 'the cat', False, **numbers)
    assert len(generate(tokens=3, samples=2)) == 2
