"""Checksums computed on devices, compared with NumPy: 64-bit integers over the flat bytes of an array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attnlab.train import checksum

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}


def expected(array):
    """Return the checksum by its definition: words of the flat bytes, mixed with their index, summed modulo 2^32."""
    array = np.asarray(array)
    word_size = array.dtype.itemsize // (2 if np.iscomplexobj(array) else 1)
    words = np.frombuffer(array.tobytes(), WORDS[word_size]).astype(np.uint64)
    index = np.arange(len(words), dtype=np.uint64)

    def mix(word):
        word = ((word ^ (word >> 16)) * 0x85EBCA6B) % 2**32
        word = ((word ^ (word >> 13)) * 0xC2B2AE35) % 2**32
        return word ^ (word >> 16)

    first = mix(words ^ (index * 0x9E3779B1 % 2**32))
    second = mix(first ^ ((index * 0x85EBCA77 + 1) % 2**32))
    return ''.join(f'{int(np.sum(sums)) % 2**32:08x}' for sums in (first, second))


def checksum_of(array):
    return checksum.tree_checksums({'x': array})['x']


def random_bits(shape, dtype):
    """Return random bits as an array; floats include NaN with any payload."""
    bits = np.random.default_rng(0).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return (bits % 2 if dtype.kind == 'b' else bits).view(dtype)[..., 0]


TYPES = ['float32', 'int32', 'uint32', jnp.bfloat16, 'float16', 'int8', 'uint8', 'int16', 'bool', 'complex64']


@pytest.mark.quick_cases(20)
@pytest.mark.parametrize('dtype', TYPES, ids=str)
@pytest.mark.parametrize('shape', [(), (5,), (3, 4, 2), (0, 3)])
def test_checksum_matches_numpy(shape, dtype):
    array = random_bits(shape, np.dtype(dtype))
    assert checksum_of(array) == checksum_of(jnp.asarray(array)) == expected(array)


@pytest.mark.parametrize('dtype', ['float64', 'int64', 'complex128'])
def test_eight_byte_dtypes_are_two_words(dtype):
    array = random_bits((3, 4), np.dtype(dtype))
    with jax.enable_x64(True):
        assert checksum_of(jnp.asarray(array)) == expected(array)


@pytest.mark.parametrize('count', [1, 2, len(jax.devices())])
def test_checksum_does_not_depend_on_sharding(count):
    array = random_bits((8, 8, 12), np.dtype(np.float32))
    one = Mesh(np.array(jax.devices()[:count]), 'x')
    two = Mesh(np.array(jax.devices()[:count]).reshape(-1, min(count, 2)), ('x', 'y'))
    for mesh, *axes in [(one,), (one, 'x'), (one, None, 'x'), (two, 'x', None, 'y'), (two, ('y', 'x')), (two, 'y')]:
        sharded = jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))
        assert checksum_of(sharded) == expected(array)


def test_any_flipped_bit_changes_both_sums():
    array = random_bits((3, 2), np.dtype(np.float32))
    right = checksum_of(array)
    for bit in range(array.nbytes * 8):
        flipped = bytearray(array.tobytes())
        flipped[bit // 8] ^= 1 << bit % 8
        wrong = checksum_of(np.frombuffer(flipped, np.float32).reshape(array.shape))
        assert wrong[:8] != right[:8] and wrong[8:] != right[8:]


def test_checksum_depends_on_bits_not_values():
    quiet, payload = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert checksum_of(np.float32([0.0])) != checksum_of(np.float32([-0.0]))
    assert checksum_of(np.float32([quiet])) != checksum_of(np.float32([payload]))
    assert checksum_of(np.float32([1, 2])) != checksum_of(np.float32([2, 1]))


def test_tree_checksums_are_keyed_by_path():
    tree = {'b': jnp.ones(3), 'a': (jnp.zeros(2), {'c': jnp.arange(4)})}
    sums = checksum.tree_checksums(tree)
    assert list(sums) == ['a/0', 'a/1/c', 'b']
    assert sums['a/1/c'] == expected(np.arange(4, dtype=np.int32)) and len(set(sums.values())) == 3
