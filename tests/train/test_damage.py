"""Whatever stands in the folder of checkpoints: the newest that is whole is found, and said what is passed over."""

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
    drawn = np.random.default_rng(step).normal(size=(40, 7)).astype(np.float32)
    return {'layer': {'kernel': jnp.asarray(drawn), 'bias': jnp.full(7, step, jnp.bfloat16)}}


def saved(step):
    return Checkpoint(step, params(step), OPTIMIZE.init(params(step)), RunProgress(0.5, 1, 0))


def shapes():
    return jax.eval_shape(lambda: (params(0), OPTIMIZE.init(params(0))))


@pytest.fixture(scope='module')
def healthy(tmp_path_factory):
    """Steps 1 and 2."""
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


def passed_over(workdir, caplog):
    """What is said of step 2 when step 1 is what is found, bit for bit."""
    caplog.clear()
    found = latest(workdir)
    assert found.step == 1 and found.progress == saved(1).progress
    jax.tree.map(np.testing.assert_array_equal, found, saved(1))
    [line] = caplog.messages
    assert line.startswith('checkpoint of step 2 is damaged and skipped: ') and '\n' not in line
    return line.removeprefix('checkpoint of step 2 is damaged and skipped: ')


def files(workdir):
    return sorted(path for path in (workdir / 'checkpoints' / '2').rglob('*') if path.is_file())


def outcome(workdir, path, content, caplog):
    """The step found when a file has another content, or is missing: 2 as it was saved, or 1 and a line."""
    right = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    caplog.clear()
    found = latest(workdir)
    path.write_bytes(right)
    jax.tree.map(np.testing.assert_array_equal, found, saved(found.step))
    lines = caplog.messages
    assert len(lines) == (found.step == 1) and all('\n' not in line for line in lines)
    assert all(line.startswith('checkpoint of step 2 is damaged and skipped: ') for line in lines)
    return found.step


def test_intact_checkpoint_is_restored(workdir, caplog):
    found = latest(workdir)
    assert found.step == 2 and not caplog.records
    jax.tree.map(np.testing.assert_array_equal, found, saved(2))


@pytest.mark.parametrize('kind', ['empty', 'cut off', 'missing'])
def test_damage_to_each_file_of_the_newest_step(workdir, kind, caplog):
    found = {}
    for path in files(workdir):
        content = path.read_bytes()
        less = {'empty': b'', 'cut off': content[: len(content) // 2], 'missing': None}[kind]
        found[path] = outcome(workdir, path, less, caplog)
    needed = [path for path, step in found.items() if step == 1]
    names = {str(path.relative_to(workdir / 'checkpoints' / '2')) for path in needed}
    assert {'progress/metadata', 'params/manifest.ocdbt', 'optimizer/manifest.ocdbt'} <= names
    data = [path for path in files(workdir) if path.parent.name == 'd']
    assert max(data, key=lambda path: path.stat().st_size) in needed  # that with the kernel
    assert latest(workdir).step == 2


def test_one_flipped_bit_in_each_file_of_the_newest_step(workdir, caplog):
    for at, path in enumerate(files(workdir)):
        for place in (0, 0.3, 0.5, 0.8):
            changed = bytearray(path.read_bytes())
            changed[int(place * len(changed))] ^= 1 << at % 8
            step = outcome(workdir, path, changed, caplog)
            assert step == 1 or path.name != 'metadata'


def test_each_flipped_bit_of_an_array_is_detected(workdir, caplog, monkeypatch):
    """Read from a whole file, and wrong all the same: told by the name of the array."""
    real, at = checkpoint._read_arrays, 0

    def flipped(folder, tree):
        arrays = real(folder, tree)
        if folder.parts[-2:] == ('2', 'params'):
            bits = np.asarray(arrays['layer']['bias']).view(np.uint16).copy()
            bits[at // 16] ^= 1 << at % 16
            arrays['layer']['bias'] = jnp.asarray(bits.view(jnp.bfloat16))
        return arrays

    monkeypatch.setattr(checkpoint, '_read_arrays', flipped)
    for at in range(7 * 16):  # noqa: B007  (read in flipped)
        why = passed_over(workdir, caplog)
        assert why == 'params/layer/bias does not have the checksum that it was saved with'


@pytest.mark.parametrize('item', ['params', 'optimizer', 'progress'])
def test_missing_item_is_detected(workdir, item, caplog):
    shutil.rmtree(workdir / 'checkpoints' / '2' / item)
    passed_over(workdir, caplog)


def test_changed_progress_is_detected(workdir, caplog):
    """Still JSON, and every array as it was."""
    path = workdir / 'checkpoints' / '2' / 'progress' / 'metadata'
    for old, new in [('"best": 0.5', '"best": 0.7'), ('"waited": 0', '"waited": 8'), ('"waited"', '"waitec"')]:
        content = path.read_bytes()
        path.write_bytes(content.replace(old.encode(), new.encode()))
        assert 'checksum' in passed_over(workdir, caplog) and path.read_bytes() != content
        path.write_bytes(content)
    record = json.loads(content)
    del record['sha256']
    path.write_text(json.dumps(record))
    passed_over(workdir, caplog)


STRAYS = {
    'a file': lambda folder: (folder / '40').write_text('notes'),
    'an empty file': lambda folder: (folder / '40').touch(),
    'a folder': lambda folder: (folder / '40').mkdir(),
    'a folder with a folder for metrics': lambda folder: (folder / '40' / 'metrics' / 'metrics').mkdir(parents=True),
    'a file in a folder': lambda folder: ((folder / '40').mkdir(), (folder / '40' / 'params').touch()),
    'temporary': lambda folder: (folder / '40.orbax-checkpoint-tmp').mkdir(),
    'temporary, older orbax': lambda folder: (folder / '40.orbax-checkpoint-tmp-17').mkdir(),
    'a temporary file': lambda folder: (folder / '40.orbax-checkpoint-tmp').touch(),
    'zeros': lambda folder: (folder / '0040').mkdir(),
    'a minus': lambda folder: (folder / '-40').mkdir(),
    'words': lambda folder: (folder / 'step_40').mkdir(),
    'another digit': lambda folder: (folder / '４').mkdir(),
}


@pytest.mark.parametrize('kind', STRAYS)
def test_stray_files_and_folders_do_no_harm(workdir, kind, caplog):
    STRAYS[kind](workdir / 'checkpoints')
    assert latest(workdir).step == 2
    with checkpoint.checkpoint_manager(workdir) as manager:
        assert checkpoint.restore_latest(manager, *shapes()).step == 2
        checkpoint.set_aside_damaged(manager, 2)
        for step in (30, 40):
            checkpoint.save_checkpoint(manager, saved(step))
    found = latest(workdir)
    jax.tree.map(np.testing.assert_array_equal, found, saved(40))
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
