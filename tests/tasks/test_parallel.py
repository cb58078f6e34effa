"""Real tasks on one device and on four: the same losses, noise, experts and padding included."""

import numpy as np
import pytest

from attnlab.train import metrics, run
from tests.tasks.conftest import tiny_config, tiny_language
from tests.tasks.test_vision import tiny

NOISE = dict(model__dropout='0.2', model__attention_dropout='0.2', train__duration='3 steps')
RUNS = {
    'language': lambda folder, **mesh: tiny_language(
        folder, data__documents='lines', model__experts='2', model__active='1', **NOISE, **mesh
    ),
    'vision': lambda folder, **mesh: tiny(data__mixup='0.5', model__layer_drop='0.3', **NOISE, **mesh),
    'pmap': lambda folder, train__mesh: tiny(
        data__mixup='0.5', train__duration='3 steps', train__mesh=train__mesh,
        train__parallel='jit' if train__mesh == 'data=1' else 'pmap',
    ),
    'align': lambda folder, **mesh: tiny_config(model__dropout='0.2', train__duration='3 steps', **mesh),
}  # fmt: skip



@pytest.mark.slow  # rows over eight devices, by jit and by pmap: tests/train/test_sharding.py
@pytest.mark.parametrize('name', ['vision', 'language', 'pmap', 'align'])
def test_several_devices_train_as_one(name, tmp_path):
    found = []
    for number in (1, 4):
        workdir = tmp_path / str(number)
        run.train(RUNS[name](tmp_path / 'data', train__mesh=f'data={number}'), workdir)
        found.append([record for record in metrics.read(workdir) if record['split'] == 'train'])
    assert len(found[0]) == len(found[1]) == 3
    for one, other in zip(*found, strict=True):
        for key in one.keys() - {'split'}:
            np.testing.assert_allclose(one[key], other[key], rtol=2e-4, err_msg=f'{key}, step {one["step"]}')
