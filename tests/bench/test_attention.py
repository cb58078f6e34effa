"""The attention benchmark, at tiny sizes."""

import json
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from attnlab.bench import attention, attention_figures, attention_functions, memory
from attnlab.bench.attention_functions import AttentionProblem, peer_names
from attnlab.errors import RunError, UserError
from attnlab.kernels.implementations import IMPLEMENTATIONS, Implementation

SHAPE = (2, 6, 2, 4)
KINDS = [(causal, backward) for causal in (False, True) for backward in (False, True)]


def weighted_sum(query, key, value, weights, causal):
    """Return the weighted sum of the output, and the output, in float64, from the formula."""
    logits = np.einsum('btnh,bsnh->bnts', query, key) / np.sqrt(query.shape[-1])
    if causal:
        logits = np.where(np.tri(logits.shape[-1], dtype=bool), logits, -np.inf)
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    output = np.einsum('bnts,bsnh->btnh', exponentials / exponentials.sum(-1, keepdims=True), value)
    return np.sum(output * weights), output


def check_function(name, causal, backward):
    """Compare the output with the formula, or the gradients with finite differences in a random direction."""
    problem = AttentionProblem(SHAPE, causal, backward)
    *arrays, weights = (x.astype(float) for x in attention_functions.random_inputs(problem, 3))
    results = [np.asarray(x) for x in attention_functions.prepare_function(name, problem, 3)()]
    if not backward:
        return np.testing.assert_allclose(results[0], weighted_sum(*arrays, weights, causal)[1], atol=2e-6)
    random = np.random.default_rng(0)
    for index, gradient in enumerate(results):
        step = np.zeros((3, *SHAPE))
        step[index] = 1e-5 * random.normal(size=SHAPE)
        above, below = (
            weighted_sum(*(x + sign * d for x, d in zip(arrays, step, strict=True)), weights, causal)[0]
            for sign in (1, -1)
        )
        np.testing.assert_allclose(np.sum(gradient * step[index]) * 2, above - below, rtol=1e-4, atol=1e-9)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(('causal', 'backward'), KINDS)
@pytest.mark.parametrize('name', ['dense', 'blockwise', 'jax.nn', 'flax'])
def test_every_jax_function_computes_attention(name, causal, backward):
    check_function(name, causal, backward)


@pytest.mark.peers
@pytest.mark.parametrize(('causal', 'backward'), KINDS)
def test_pytorch_computes_attention(causal, backward):
    check_function('PyTorch', causal, backward)


def test_the_implementation_taken_by_none_comes_first():
    assert attention_functions.supported_implementations(AttentionProblem(SHAPE)) == ('dense', 'blockwise')
    assert attention_functions.supported_implementations(AttentionProblem((1, 16384, 4, 64), True, True)) == (
        'blockwise',
        'dense',
    )


def test_an_implementation_that_does_not_support_the_call_is_left_out(monkeypatch):
    def unsupported(call):
        raise NotImplementedError('query: no such device')

    other = SimpleNamespace(dot_product=unsupported, is_preferred=lambda call, platform: True)
    monkeypatch.setitem(sys.modules, 'other', other)
    monkeypatch.setitem(IMPLEMENTATIONS, 'other', Implementation('other', 'supports no call'))
    problem = AttentionProblem((1, 7, 2, 4))
    assert 'other' not in attention_functions.supported_implementations(problem)
    assert attention.reason_not_run('other', problem) == 'does not support this call'


def test_a_function_that_needs_too_much_memory_is_not_run(monkeypatch):
    monkeypatch.setattr(memory, 'available_memory', lambda: 24 * 2**30)
    long = AttentionProblem((1, 16384, 4, 64), backward=True)
    assert attention.reason_not_run('jax.nn', long) == 'needs about 28 GiB, 24 are free'
    assert attention.reason_not_run('dense', long) and attention.reason_not_run('flax', long)
    others = [name for name in peer_names() if name == 'PyTorch']  # if it is installed
    assert all(attention.reason_not_run(name, long) == '' for name in ('blockwise', *others))
    assert attention.reason_not_run('jax.nn', long._replace(backward=False)) == ''


def test_different_results_are_an_error():
    a, b = np.ones(3, np.float32), np.full(3, 1 + 5e-6, np.float32)
    attention.check_agreement({'ours': (a, a), 'theirs': (b, a)}, AttentionProblem(SHAPE))
    for wrong in (a * (1 + 5e-5), a * np.nan):
        with pytest.raises(RunError, match='ours and theirs differ by .*: 2x6x2x4, plain, forward'):
            attention.check_agreement({'ours': (a, a), 'theirs': (a, wrong)}, AttentionProblem(SHAPE))


@pytest.mark.slow
def test_tables_numbers_and_figures_are_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(attention, 'ROUNDS', 3)
    monkeypatch.setattr(attention_functions, 'find_spec', lambda name: None)
    monkeypatch.setattr(memory, 'can_measure_memory', lambda: True)
    monkeypatch.setattr(memory, 'available_memory', lambda: 2.0 * 2**30)

    def peak(name, problem):
        if name == 'dense':
            raise RunError('was ended by the system')
        return problem.shape[1] * 2**20

    monkeypatch.setattr(memory, 'measure_peak_memory', peak)
    attention.measure_attention([SHAPE], [32, 8192], tmp_path / 'deep' / 'folder')
    lines = capsys.readouterr().out.splitlines()
    assert 'jax' in lines[0] and 'seed 0' in lines[0]
    assert lines[1] == "PyTorch is not measured: it is not installed; pip install 'attnlab[peers]' installs it"
    tables = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines if line.startswith('|')]
    assert tables[0] == ['T', 'blockwise', 'dense', 'jax.nn']
    assert tables[2:4] == [['32', '32', '-', '32'], ['8,192', '8,192', '-', '-']]
    assert any('dense at 1x32x4x64' in line and 'ended by the system' in line for line in lines)
    assert any('jax.nn at 1x8192x4x64' in line and 'needs about 7 GiB, 2 are free' in line for line in lines)
    head, _, *rows = tables[4:]
    assert head == ['B, T, N, H', 'mask', 'pass', 'blockwise', 'dense', 'jax.nn', 'flax', 'times'] and len(rows) == 4
    for row in rows:
        ours, theirs = float(row[4].strip('*')), min(float(cell) for cell in row[5:7])
        assert row[4].startswith('**') and float(row[-1]) == pytest.approx(theirs / ours, abs=0.01, rel=0.01)
    numbers = json.loads((tmp_path / 'deep/folder/numbers.json').read_text())
    assert len(numbers['speed']) == 4 and numbers['speed'][0]['shape'] == list(SHAPE)
    assert all(len(times) == 3 for times in numbers['speed'][0]['seconds'].values())
    assert numbers['memory'][1]['bytes'] == {'blockwise': 2**33}
    assert {path.name for path in (tmp_path / 'deep/folder').iterdir()} == {'numbers.json', 'memory.png', 'speed.png'}


def test_a_folder_that_cannot_be_created_is_refused_before_measuring(tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(UserError, match='cannot make the folder .*file/attention: Not a directory'):
        attention.measure_attention([SHAPE], [], tmp_path / 'file' / 'attention')


def test_other_devices_than_a_cpu_are_refused(monkeypatch):
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    with pytest.raises(UserError, match='runs on the CPU, got gpu; set JAX_PLATFORMS=cpu'):
        attention.main()


def test_figures_have_these_lines():
    rows = [{'shape': [1, T, 2, 4], 'causal': causal, 'backward': backward, 'chosen': 'blockwise',
             'seconds': {'blockwise': [9.0, 1.0, 2.0], 'flax': [8.0], **({'jax.nn': [4.0]} if T < 64 else {})}}
            for T in (16, 32, 64) for causal, backward in KINDS]  # fmt: skip
    for axes in attention_figures.plot_speed(rows).axes:
        lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
        assert lines['attnlab'] == [[16, 2], [32, 2]] and lines['flax'] == [[16, 0.5], [32, 0.5]]
        assert [(note.get_text(), note.xy[0]) for note in axes.texts] == [('jax.nn: out of memory', 64)]
    peaks = [{'shape': [1, T, 2, 4], 'bytes': {'blockwise': T * 2**20}} for T in (16, 32)]
    (axes,) = attention_figures.plot_memory(peaks).axes
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[16, 16], [32, 32]]]


@pytest.mark.slow
@pytest.mark.skipif(not memory.can_measure_memory(), reason='only Linux reports peak memory')
def test_peak_memory_is_that_of_the_call(monkeypatch):
    monkeypatch.delenv('XLA_FLAGS')  # one device, as in a benchmark; each further device has its own threads
    held = np.ones(2**28, np.uint8)  # memory of this process must not count
    matrix = 4 * 2048**2 * 4
    # Logits and weights, and with jaxlib 0.10.1 sometimes an intermediate array.
    assert (
        1.9 * matrix
        < memory.measure_peak_memory('jax.nn', AttentionProblem((1, 2048, 4, 64)))
        < 3.3 * matrix
        < 0.9 * held.size
    )
    del held
