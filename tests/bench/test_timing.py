"""Interleaved times, and the line that describes the machine."""

import platform
import time

import pytest

from attnlab.bench import timing


def test_functions_take_turns_after_one_untimed_call_each():
    calls = []
    times = timing.time_interleaved({name: lambda name=name: calls.append(name) for name in 'abc'}, rounds=4)
    assert ' '.join(''.join(calls[i : i + 3]) for i in range(0, len(calls), 3)) == 'abc abc bca cab abc'
    assert {name: len(seconds) for name, seconds in times.items()} == {'a': 4, 'b': 4, 'c': 4}


def test_each_time_belongs_to_its_function(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, 'perf_counter', lambda: clock[0])

    def takes(seconds):
        clock[0] += seconds

    times = timing.time_interleaved({'slow': lambda: takes(2.0), 'fast': lambda: takes(0.5)}, rounds=3)
    assert times == {'slow': [2.0] * 3, 'fast': [0.5] * 3}


def test_a_seed_draws_the_order_of_each_round():
    def order(seed):
        calls = []
        timing.time_interleaved({name: lambda name=name: calls.append(name) for name in 'abcd'}, rounds=40, seed=seed)
        return ''.join(calls[4:])  # the untimed calls come first

    drawn = order(0)
    assert all(sorted(drawn[i : i + 4]) == list('abcd') for i in range(0, 160, 4))
    assert len({drawn[i : i + 4] for i in range(0, 160, 4)}) > 12
    assert order(0) == drawn != order(1)


def test_functions_that_disagree_are_not_timed():
    calls = []

    def check(results):
        calls.append(results)
        raise RuntimeError('different')

    with pytest.raises(RuntimeError, match='different'):
        timing.time_interleaved(
            {name: lambda name=name: calls.append(name) or name.upper() for name in 'ab'}, 3, check=check
        )
    assert calls == ['a', 'b', {'a': 'A', 'b': 'B'}]


def test_no_round_begins_after_the_time_is_up(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, 'perf_counter', lambda: clock[0])

    def takes(seconds):
        clock[0] += seconds

    def rounds(seconds):
        return len(timing.time_interleaved({name: lambda: takes(1.0) for name in 'ab'}, rounds=9, seconds=seconds)['a'])

    assert [rounds(seconds) for seconds in (0.0, 6.0, 8.0, 9.5, 100.0)] == [3, 3, 4, 5, 9]


def test_the_machine_is_described_in_a_line():
    line = timing.describe_hardware(['numpy', 'no-such-package'])
    processor, cores, *versions = line.rsplit(', ', 3)
    assert processor
    assert int(cores.split()[0]) >= 1
    assert versions[0] == f'Python {platform.python_version()}'
    assert versions[1].startswith('numpy ')
    assert 'no-such-package' not in line


def test_the_processor_name_is_read_from_cpuinfo(tmp_path):
    cpuinfo = tmp_path / 'cpuinfo'
    cpuinfo.write_text('processor\t: 0\nmodel name\t: Fast CPU: 3 GHz\nprocessor\t: 1\nmodel name\t: Other\n')
    assert timing._processor_name(cpuinfo) == 'Fast CPU: 3 GHz'
    cpuinfo.write_text('processor\t: 0\nBogoMIPS\t: 50\n')
    assert timing._processor_name(cpuinfo) == timing._processor_name(tmp_path / 'absent') != ''


def test_a_function_is_called_untimed_while_it_settles():
    calls = []
    functions = {name: lambda name=name: calls.append(name) or time.sleep(0.02) for name in ('a', 'b')}
    times = timing.time_interleaved(functions, 2, settle=0.05)
    turns = ''.join(calls)[2:]
    assert turns.count('a') >= 8 and 'ab' in turns and turns.replace('aa', 'a').replace('bb', 'b').count('ab') == 1
    assert all(len(seconds) == 2 and min(seconds) >= 0.02 for seconds in times.values())
