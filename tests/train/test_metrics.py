"""Reading and continuing damaged metrics files."""

import pytest

from attnlab.errors import RunError
from attnlab.train import metrics

BROKEN = (
    b'\xff\xfe\x00', b'', b'{"step', b'{}', b'null', b'5', b'[1, "train"]', b'{"step": "1", "split": "train"}',
    b'{"step": 1}', b'{"step": 1, "split": 2}', b'{"step": 1, "split": "train", "loss": "low"}',
    b'{"step": 1, "split": "train", "loss": [1]}', b'{"step": 1, "split": "train", "loss": 1' + b'0' * 400 + b'}',
    b'{"step": 1, "split": "train", "loss": NaN}', b'{"step": 1' + b'0' * 400 + b', "split": "train"}', b'[' * 100_000,
)  # fmt: skip


def test_invalid_metrics_lines_are_left_out_and_counted(tmp_path, caplog):
    valid = b'{"step": 1, "split": "train", "loss": 0.5, "skipped": null}\n{"step": 2, "split": "speed", "rate": 7}\n'
    path = tmp_path / 'metrics.jsonl'
    path.write_bytes(b'\n'.join(BROKEN) + b'\n' + valid + b'{"step": 9, "spl')  # a kill truncated the last line
    assert metrics.read_metrics(tmp_path) == [
        {'step': 1, 'split': 'train', 'loss': 0.5, 'skipped': None}, {'step': 2, 'split': 'speed', 'rate': 7},
    ]  # fmt: skip
    assert caplog.messages == [f'{path}: left out {len(BROKEN)} lines that are not valid records, first line 1']


@pytest.mark.parametrize('line', [b'\xff\xfe\x00', b'{"step', b'{}', b'null', b'[' * 100_000])
def test_writer_refuses_a_file_with_an_invalid_line_and_leaves_it_unchanged(tmp_path, line):
    path = tmp_path / 'metrics.jsonl'
    path.write_bytes(line + b'\n')
    with pytest.raises(RunError, match='^.*metrics.jsonl has a line that is not a record of a step: delete that line'):
        with metrics.metrics_writer(tmp_path, 5):
            pass
    assert path.read_bytes() == line + b'\n'
