"""One batch on one device or divided among several: the same run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.errors import UserError
from attnlab.train import devices, loop
from tests.train.test_loop import config, make_task, newest, records


def close(one, other):
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            if name != 'split':
                np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize('accumulate', [1, 2])
@pytest.mark.parametrize('count', [2, 4])
def test_several_devices_train_as_one(tmp_path, count, accumulate):
    assert len(jax.devices()) == 4
    for number in (1, count):
        made = config(devices=number, accumulate=accumulate, duration='5 steps')
        loop.train(made, make_task(), tmp_path / str(number))
    for split in ('train', 'valid'):
        close(records(tmp_path / '1', split), records(tmp_path / str(count), split))
    one, other = (newest(tmp_path / str(number)).params['w'] for number in (1, count))
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_run_goes_on_with_another_number_of_devices(tmp_path):
    loop.train(config(devices=1, schedule='constant'), make_task(), tmp_path / 'whole')
    for number, steps in ((1, 7), (4, 12), (2, 20)):
        made = config(devices=number, duration=f'{steps} steps', schedule='constant')
        loop.train(made, make_task(), tmp_path / 'parts')
    close(records(tmp_path / 'whole', 'train'), records(tmp_path / 'parts', 'train'))


def test_the_same_bits_again(tmp_path):
    for name in ('one', 'other'):
        loop.train(config(devices=4), make_task(), tmp_path / name)
    assert records(tmp_path / 'one', 'train') == records(tmp_path / 'other', 'train')


@pytest.mark.parametrize(('rows', 'count'), [(8, 4), (6, 3), (7, 1), (2, 2), (12, 4)])
def test_as_many_devices_as_divide_the_rows(rows, count):
    assert devices.data_mesh(0, rows).shape == {'data': count}


@pytest.mark.parametrize(('wanted', 'rows', 'message'), [
    (5, 10, r'train.devices is 5; expected 0 \(all\) to 4, those of this process'),
    (-1, 10, r'train.devices is -1; expected 0'),
    (4, 6, r'train.devices is 4; expected a divisor of the 6 rows of a \(micro-\)batch'),
])  # fmt: skip
def test_what_cannot_be_divided_is_refused(wanted, rows, message):
    with pytest.raises(UserError, match=message):
        devices.data_mesh(wanted, rows)


def test_each_device_has_its_rows():
    mesh = devices.data_mesh(4, 8)
    parts = jax.device_put(np.arange(16).reshape(8, 2), devices.rows(mesh))
    assert [shard.data.shape for shard in parts.addressable_shards] == [(2, 2)] * 4
    whole = jax.device_put({'w': jnp.ones(3)}, devices.everywhere(mesh))
    assert len(whole['w'].devices()) == 4 and devices.local(whole)['w'].devices() == {jax.devices()[0]}
