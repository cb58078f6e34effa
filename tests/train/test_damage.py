"""Damaged and stray files in the folder of checkpoints: the newest intact step is restored, skipped ones are logged."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attnlab.errors import UserError
from attnlab.train import checkpoint
from attnlab.train.checkpoint import Checkpoint, RunProgress

OPTIMIZE = optax.adam(1e-3)


def params(step):
    kernel = np.random.default_rng(step).normal(size=(40, 7)).astype(np.float32)
    return {'layer': {'kernel': jnp.asarray(kernel), 'bias': jnp.full(7, step, jnp.bfloat16)}}


def saved(step):
    return Checkpoint(step, params(step), OPTIMIZE.init(params(step)), RunProgress(0.5, 1, 0))


def shapes():
    return jax.eval_shape(lambda: (params(0), OPTIMIZE.init(params(0))))


@pytest.fixture(scope='module')
def healthy(tmp_path_factory):
    """A directory with the checkpoints of steps 1 and 2."""
    workdir = tmp_path_factory.mktemp('healthy')
    with checkpoint.checkpoint_manager(workdir) as manager:
        for step in (1, 2):
            checkpoint.save_checkpoint(manager, saved(step))
    return workdir


@pytest.fixture
def workdir(healthy, tmp_path):
    return shutil.copytree(healthy, tmp_path / 'run')


def latest(workdir):
    with checkpoint.checkpoint_manager(workdir, read_only=True) as manager:
        return checkpoint.restore_latest(manager, *shapes())


def skip_reason(workdir, caplog):
    """Assert that step 1 is restored bit for bit; return the logged reason for skipping step 2."""
    caplog.clear()
    restored = latest(workdir)
    assert restored.step == 1 and restored.progress == saved(1).progress
    jax.tree.map(np.testing.assert_array_equal, restored, saved(1))
    [line] = caplog.messages
    assert line.startswith('checkpoint of step 2 is damaged and skipped: ') and '\n' not in line
    return line.removeprefix('checkpoint of step 2 is damaged and skipped: ')


def files(workdir):
    return sorted(path for path in (workdir / 'checkpoints' / '2').rglob('*') if path.is_file())


def restore_after_change(workdir, path, content, caplog):
    """Return the step that is restored if a file has other content, or is missing if `content` is None.

    Assert that it is step 2 as it was saved, or step 1 and one log line.
    """
    original = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    caplog.clear()
    restored = latest(workdir)
    path.write_bytes(original)
    jax.tree.map(np.testing.assert_array_equal, restored, saved(restored.step))
    lines = caplog.messages
    assert len(lines) == (restored.step == 1) and all('\n' not in line for line in lines)
    assert all(line.startswith('checkpoint of step 2 is damaged and skipped: ') for line in lines)
    return restored.step


def test_intact_checkpoint_is_restored(workdir, caplog):
    restored = latest(workdir)
    assert restored.step == 2 and not caplog.records
    jax.tree.map(np.testing.assert_array_equal, restored, saved(2))


@pytest.mark.parametrize('kind', ['empty', 'cut off', 'missing'])
def test_damage_to_each_file_of_the_newest_step(workdir, kind, caplog):
    steps = {}
    for path in files(workdir):
        content = path.read_bytes()
        damaged = {'empty': b'', 'cut off': content[: len(content) // 2], 'missing': None}[kind]
        steps[path] = restore_after_change(workdir, path, damaged, caplog)
    needed = [path for path, step in steps.items() if step == 1]
    names = {str(path.relative_to(workdir / 'checkpoints' / '2')) for path in needed}
    assert {'progress/metadata', 'params/manifest.ocdbt', 'optimizer/manifest.ocdbt'} <= names
    data = [path for path in files(workdir) if path.parent.name == 'd']
    assert max(data, key=lambda path: path.stat().st_size) in needed  # the file with the kernel
    assert latest(workdir).step == 2


@pytest.mark.slow
def test_one_flipped_bit_in_each_file_of_the_newest_step(workdir, caplog):
    for number, path in enumerate(files(workdir)):
        for position in (0, 0.3, 0.5, 0.8):
            changed = bytearray(path.read_bytes())
            changed[int(position * len(changed))] ^= 1 << number % 8
            step = restore_after_change(workdir, path, changed, caplog)
            assert step == 1 or path.name != 'metadata'


@pytest.mark.slow
def test_each_flipped_bit_of_an_array_is_detected(workdir, caplog, monkeypatch):
    """The file is intact and the array read from it is wrong: the reason names the array."""
    read_arrays, bit = checkpoint._read_arrays, 0

    def read_with_flipped_bit(folder, tree):
        arrays = read_arrays(folder, tree)
        if folder.parts[-2:] == ('2', 'params'):
            bits = np.asarray(arrays['layer']['bias']).view(np.uint16).copy()
            bits[bit // 16] ^= 1 << bit % 16
            arrays['layer']['bias'] = jnp.asarray(bits.view(jnp.bfloat16))
        return arrays

    monkeypatch.setattr(checkpoint, '_read_arrays', read_with_flipped_bit)
    for bit in range(7 * 16):  # noqa: B007  (used in read_with_flipped_bit)
        reason = skip_reason(workdir, caplog)
        assert reason == 'params/layer/bias does not have the checksum that it was saved with'


@pytest.mark.parametrize('item', ['params', 'optimizer', 'progress'])
def test_missing_item_is_detected(workdir, item, caplog):
    shutil.rmtree(workdir / 'checkpoints' / '2' / item)
    skip_reason(workdir, caplog)


def test_changed_progress_is_detected(workdir, caplog):
    """The file is still JSON, and every array is unchanged."""
    path = workdir / 'checkpoints' / '2' / 'progress' / 'metadata'
    for old, new in [('"best": 0.5', '"best": 0.7'), ('"waited": 0', '"waited": 8'), ('"waited"', '"waitec"')]:
        content = path.read_bytes()
        path.write_bytes(content.replace(old.encode(), new.encode()))
        assert 'checksum' in skip_reason(workdir, caplog) and path.read_bytes() != content
        path.write_bytes(content)
    record = json.loads(content)
    del record['sha256']
    path.write_text(json.dumps(record))
    skip_reason(workdir, caplog)


STRAYS = {
    'a file': lambda folder: (folder / '40').write_text('notes'),
    'an empty file': lambda folder: (folder / '40').touch(),
    'a folder': lambda folder: (folder / '40').mkdir(),
    'a folder with a folder for metrics': lambda folder: (folder / '40' / 'metrics' / 'metrics').mkdir(parents=True),
    'a file in a folder': lambda folder: ((folder / '40').mkdir(), (folder / '40' / 'params').touch()),
    'temporary': lambda folder: (folder / '40.orbax-checkpoint-tmp').mkdir(),
    'temporary, older orbax': lambda folder: (folder / '40.orbax-checkpoint-tmp-17').mkdir(),
    'a temporary file': lambda folder: (folder / '40.orbax-checkpoint-tmp').touch(),
    'leading zeros': lambda folder: (folder / '0040').mkdir(),
    'a minus': lambda folder: (folder / '-40').mkdir(),
    'letters': lambda folder: (folder / 'step_40').mkdir(),
    'a Unicode digit': lambda folder: (folder / '４').mkdir(),
}


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize('kind', STRAYS)
def test_stray_files_and_folders_do_no_harm(workdir, kind, caplog):
    STRAYS[kind](workdir / 'checkpoints')
    assert latest(workdir).step == 2
    with checkpoint.checkpoint_manager(workdir) as manager:
        assert checkpoint.restore_latest(manager, *shapes()).step == 2
        checkpoint.set_aside_damaged(manager, 2)
        for step in (30, 40):
            checkpoint.save_checkpoint(manager, saved(step))
    restored = latest(workdir)
    jax.tree.map(np.testing.assert_array_equal, restored, saved(40))
    lines = [record.getMessage() for record in caplog.records if record.name == 'root']
    assert all('of step 40 is' in line for line in lines) and len(lines) in (0, 3)


def test_all_steps_damaged_raises(workdir, caplog):
    for step in '12':
        (workdir / 'checkpoints' / step / 'params' / 'manifest.ocdbt').write_bytes(b'')
    with pytest.raises(UserError, match=r'no checkpoint in .* can be read; tried steps \[1, 2\]'):
        latest(workdir)
    assert len(caplog.messages) == 2


def test_newest_step_replaces_a_damaged_best_step(workdir, caplog):
    (workdir / 'checkpoints' / '1' / 'params' / 'manifest.ocdbt').write_bytes(b'')
    with checkpoint.checkpoint_manager(workdir, read_only=True) as manager:
        assert checkpoint.restore_best(manager, shapes()[0]).step == 2
    assert len(caplog.messages) == 1


def test_deleted_best_step_is_reported_as_missing(workdir, caplog):
    shutil.rmtree(workdir / 'checkpoints' / '1')
    with checkpoint.checkpoint_manager(workdir, read_only=True) as manager:
        assert checkpoint.restore_best(manager, shapes()[0]).step == 2
    [line] = caplog.messages
    assert line.startswith('checkpoint of step 1 is missing and skipped: ')
