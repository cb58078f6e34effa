"""What one does with a language model: it writes, and its attention is drawn."""

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

# Writing


@pytest.fixture(scope='module')
def write(speaker):
    model, params, vocabulary, _ = speaker
    return partial(generation.generate_texts, model, params, vocabulary, 'the cat', False)


def test_the_likeliest_text_is_a_plain_loops(speaker, write, caplog):
    caplog.set_level('INFO')
    *_, vocabulary, logits = speaker
    text = seen = vocabulary.encode('the cat').tolist()
    for _ in range(2 * T):
        seen = seen if len(seen) <= T else seen[-T // 2 :]
        following = int(logits(np.array(seen))[-1].argmax())
        text, seen = [*text, following], [*seen, following]
    assert write(tokens=2 * T, temperature=0.0) == [decode_ids(vocabulary, text)]
    assert len(set(text[-8:])) > 3
    assert caplog.messages == ['the context of 16 tokens is full: goes on from its last half']
    assert write(tokens=2 * T, top_k=1, seed=5) == [decode_ids(vocabulary, text)]


def test_a_sample_is_the_same_however_many_there_are(write):
    many = write(tokens=30, samples=3)
    assert write(tokens=30) == many[:1]
    assert len(set(many)) == 3 and {len(text) for text in many} == {len('the cat') + 30}
    assert write(tokens=30, seed=1) != many[:1]


def test_many_tokens_are_one_program(write, monkeypatch):
    made, real = [], generation.build_sampler
    monkeypatch.setattr(generation, 'build_sampler', lambda *args: made.append(real(*args)) or made[-1])
    (text,) = write(tokens=200)
    assert len(text) == 207 and [each._cache_size() for each in made] == [1]


def test_documents_end_with_their_own_end(documents):
    task, params, _ = run.load_run(documents)
    say = partial(generation.generate_texts, task.model, params, task.vocabulary, documents=True, tokens=60)
    many = say('', samples=8, seed=1)
    few = say('', samples=4, seed=1)
    assert few == many[:4]
    lengths = [*map(len, many)]
    # One goes on past the context while another, not among the few, has ended in the last half of it.
    assert max(lengths[:4]) > T + 9 and all(length < T // 2 or length > T for length in lengths[:4])
    assert any(T // 2 < length < T - 2 for length in lengths[4:]) and max(lengths) < 60
    assert say('Jim', samples=2)[1].startswith('Jim')


def test_words_of_a_prompt_that_training_lacks_are_named(caplog):
    vocabulary = tokenizers.build_tokenizer(
        'subwords', [SourceText(line, 'lines') for line in LINES], 300, documents=True
    )
    generation.encode_prompt(vocabulary, 'the cät sees\n日本 the cat', True)
    assert caplog.messages == ['unknown words, not in the training text of the model: cät, 日本']


@pytest.mark.parametrize('documents', [True, False])
def test_a_prompt_of_which_nothing_is_left_is_empty(documents):
    vocabulary = tokenizers.build_tokenizer(
        'subwords', [SourceText(line, 'lines') for line in LINES], 300, documents=True
    )
    with pytest.raises(UserError, match='the prompt is empty'):
        generation.encode_prompt(vocabulary, '\u200b', documents)


REFUSED = [
    ([], 'the prompt is empty; expected some text to go on from'),
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


@pytest.mark.parametrize(('flags', 'message'), REFUSED, ids=[' '.join(flags) for flags, _ in REFUSED])
def test_generate_refuses_in_one_line(stream, capsys, flags, message):
    assert cli.main(['generate', f'--workdir={stream}', *flags]) == 2
    out, error = capsys.readouterr()
    assert out == '' and error.startswith(f'attnlab: {message}') and error.count('\n') == 1


def test_generate_prints_each_text(stream, capsys):
    flags = ['--prompt=the cat', '--tokens=5', '--samples=2', '--temperature=0']
    assert cli.main(['generate', f'--workdir={stream}', *flags]) == 0
    text = capsys.readouterr().out
    assert len(text) == 2 * (7 + 5 + 1) and text[:13] == text[13:] and text.startswith('the cat')


# Looking


def test_attend_draws_each_layer_and_keeps_the_run_as_it_is(stream, speaker, capsys):
    *_, vocabulary, _ = speaker
    before, text = hash_run_files(stream), 'the cat fears'
    assert cli.main(['attend', f'--workdir={stream}', text]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in written] == ['weights.npz', 'attention-layer1.png']
    assert len({path.parent for path in written}) == 1 and written[0].parent.parent == stream / 'figures'
    assert written[1].read_bytes().startswith(b'\x89PNG\r\n') and hash_run_files(stream) == before
    with np.load(written[0], allow_pickle=False) as arrays:
        weights = arrays['attention']
        pieces = list(text.replace(' ', vocabulary.pieces(vocabulary.encode(' '))[0]))
        assert arrays['rows attention'].tolist() == pieces
        assert arrays['columns attention'].tolist() == pieces
    assert weights.shape == (1, 2, len(text), len(text))
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-6)
    np.testing.assert_array_equal(np.triu(weights, 1), 0)
    assert weights[0, :, 1:].min(axis=-1, where=np.tri(len(text), dtype=bool)[1:], initial=1).min() > 0


@pytest.mark.parametrize(('argv', 'message'), [
    (['--layer=2', 'the cat'], '--layer is 2; expected 1 to 1, those of '),
    (['--layer=0', 'the cat'], '--layer is 0; expected 1 to 1, those of '),
    (['--head=3', 'the cat'], '--head is 3; expected 1 to 2, those of '),
    (['the cat the dog bit'], 'the text has 19 tokens; expected at most 16, the context of the model'),
    (['the cät'], "prompt, line 1: character 'ä'"),
])  # fmt: skip
def test_attend_refuses_before_anything_is_written(stream, capsys, argv, message):
    before = sorted(stream.rglob('*'))
    assert cli.main(['attend', f'--workdir={stream}', *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f'attnlab: {message}') and error.count('\n') == 1
    assert sorted(stream.rglob('*')) == before


def test_a_run_does_what_its_task_does(stream, translating, capsys):
    assert cli.main(['translate', f'--workdir={stream}', 'the cat sleeps.']) == 2
    assert capsys.readouterr().err == "attnlab: a run of task 'language' does not translate\n"
    assert cli.main(['generate', f'--workdir={translating}', '--prompt=the cat']) == 2
    assert capsys.readouterr().err == "attnlab: a run of task 'align' does not generate\n"


def test_what_is_larger_than_the_memory_is_refused_before_anything_is_made(speaker, write, monkeypatch):
    """On a machine of 16 GB; the parameters come as shapes, with which nothing could be computed."""
    model, params, vocabulary, _ = speaker
    shapes = jax.eval_shape(lambda: params)
    monkeypatch.setattr(environment, 'host_memory_bytes', lambda: 16 * 10**9)
    for numbers in (dict(tokens=10**9), dict(samples=10**9, tokens=1), dict(samples=10**5, tokens=10**5)):
        with pytest.raises(UserError, match='samples of .* tokens take about .* bytes; this machine has 1.6e\\+10'):
            generation.generate_texts(model, shapes, vocabulary, 'the cat', False, **numbers)
    assert len(write(tokens=3, samples=2)) == 2
