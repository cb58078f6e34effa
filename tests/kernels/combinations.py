"""Random attention calls: the grid on which every implementation is tested, small calls, and their arguments."""

import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from tests.kernels import oracle
from tests.kernels.calls import random_arrays

LENGTHS = (1, 2, 7, 33, 64, 127, 255, 256, 257, 1025)
HEADS = ((1, 1), (2, 1), (4, 2), (4, 4), (6, 3))
WIDTHS = (1, 2, 3, 16, 31, 64, 80, 128, 256)
BLOCKS = (None, (16, 32), (32, 16), (64, 128), (512, 2048), (8, 8))
DTYPES = ('float32', 'bfloat16', 'float16')
MASKS = ('mask', 'query_lengths', 'key_lengths', 'causal', 'prefix', 'window', 'segments')
OTHERS = ('bias', 'norm', 'cap', 'scale', 'sinks', 'alibi', 'dropout', 'poison')
AXES = tuple(map(''.join, itertools.product(*zip('BNTS', '1111', strict=True))))
SMALL = ((2, 5, 5, 4, 2, 3, 4), (2, 3, 6, 4, 1, 3, 4), (1, 1, 4, 2, 2, 3, 2))
WINDOWS = (0, 1, 20, (3, 0), (0, 5), (40, 7), (2000, 0))
VARIANTS = {
    'mask': AXES, 'bias': AXES, 'window': WINDOWS, 'segments': ('packed', 'mixed'), 'norm': ('l2', 'rms'),
    'scale': ('number', 'array'), 'dropout': (0.1, 0.5), 'positions': ('decode', 'far', 'permuted', 'negative'),
}  # fmt: skip
"""The variants of the options that have several; the other options are used or not."""


class Combination(NamedTuple):
    """A description of a random call.

    sizes: B, T, S, N, K, H, Hv.
    blocks: (queries, keys) of a block, for implementations that have blocks.
    options: the options that the call uses, with their variants; True for an option without variants.
    """

    seed: int
    sizes: tuple[int, ...]
    dtype: str
    blocks: tuple[int, int] | None
    options: dict[str, Any]

    def __str__(self) -> str:
        B, T, S, N, K, H, Hv = self.sizes
        blocks = 'x'.join(map(str, self.blocks)) if self.blocks else 'own'
        options = [name if variant is True else f'{name}_{variant}' for name, variant in self.options.items()]
        name = '-'.join([f'{self.seed}-{T}x{S}-B{B}-N{N}K{K}-H{H}v{Hv}-{blocks}-{self.dtype}', *options])
        return name.translate({ord(letter): '_' if letter == ',' else None for letter in ' (),'})


def grid_combination(seed: int) -> Combination:
    """Return the call of a seed: up to three kinds of masks, and each other option with a probability of 0.3."""
    random = np.random.default_rng((79, seed))
    pick = lambda values: values[random.integers(len(values))]
    happens = lambda probability=0.3: random.random() < probability
    sizes = ()
    while not sizes or math.prod(sizes[:4]) > 2 * 1025**2:
        H = pick(WIDTHS)
        sizes = pick((1, 2, 3)), pick(LENGTHS), pick(LENGTHS), *pick(HEADS), H, H if happens(0.7) else pick(WIDTHS)
    masks = sorted({pick((*MASKS, 'mask', 'window')) for _ in range(pick((0, 1, 2, 3)))})
    others = [name for name in OTHERS if happens()]
    options = {name: pick(VARIANTS.get(name, (True,))) for name in (*masks, *others)}
    options |= {'low': True} if 'bias' in options and happens() else {}
    uses_positions = {'causal', 'prefix', 'window', 'alibi'} & options.keys()
    options |= {'positions': pick(VARIANTS['positions'])} if uses_positions and happens() else {}
    # Two tiles or more in each direction if possible; thousands of tiles would take long and test nothing new.
    counts = {blocks: tile_counts(sizes, blocks) for blocks in BLOCKS}
    several = [blocks for blocks in BLOCKS if 1 not in counts[blocks] and math.prod(counts[blocks]) < 1000]
    blocks = pick(several if several and happens(0.8) else BLOCKS[:-1])
    return Combination(seed, sizes, pick(DTYPES[:1] * 3 + DTYPES), blocks, options)


def small_combination(seed: int, additive: bool = False) -> Combination:
    """Return a call with one of few shapes, because each shape is compiled; if `additive`, with a score vector."""
    random = np.random.default_rng((81, seed))
    happens = lambda probability: random.random() < probability
    masks = [name for name in MASKS if name != 'prefix' and happens(0.35)]
    others = [name for name in ('norm', 'cap', 'scale', 'sinks', 'alibi') if happens(0.3) and not additive]
    variants = {name: VARIANTS.get(name, (True,)) for name in (*masks, *others, *(['bias'] if happens(0.5) else []))}
    variants |= {name: ('BNTS', '1N1S', 'B1T1', '11TS') for name in ('mask', 'bias') if name in variants}
    variants |= {'positions': VARIANTS['positions']} if happens(0.5) else {}
    options = {name: values[random.integers(len(values))] for name, values in variants.items()}
    options |= {'score': True} if additive else {}
    return Combination(seed, SMALL[seed % len(SMALL)], 'float32', None, options)


def tile_counts(sizes: tuple[int, ...], blocks: tuple[int, int] | None) -> tuple[int, int]:
    """Return the numbers of blocks of queries and of keys; one of each if the implementation chooses the blocks."""
    return (-(-sizes[1] // blocks[0]), -(-sizes[2] // blocks[1])) if blocks else (1, 1)


def make_arguments(combination: Combination) -> tuple[dict[str, np.ndarray], dict[str, Any], np.ndarray]:
    """Return the oracle's arguments: arrays that have gradients, all others, and the cotangent of the output."""
    random = np.random.default_rng((80, combination.seed))
    B, T, S, N, _, H, Hv = combination.sizes
    options = combination.options
    arrays = random_arrays(combination.sizes, random)
    kwargs = _mask_arguments(combination, random)
    if 'bias' in options:
        arrays['bias'] = random.normal(size=_axes_shape(options['bias'], combination.sizes))
        arrays['bias'][random.random(arrays['bias'].shape) < 0.2 * ('low' in options)] = -np.inf
    if 'score' in options:
        arrays['score'] = random.normal(size=(N, H))
    if 'sinks' in options:
        arrays['sinks'] = 2 * random.normal(size=N)
    if 'alibi' in options:  # logits of some tens at most, because float32 has too few decimals for larger ones
        offsets = oracle.position_offsets(np.arange(B)[:, None, None], *np.ogrid[:T, :S], **kwargs)
        arrays['alibi_slopes'] = random.uniform(0.3, 1, N) * min(0.5, 20 / max(1, np.abs(offsets).max()))
    if 'scale' in options:
        scale = 5.0 if options.get('norm') == 'l2' else 1.4 / math.sqrt(H)
        kwargs['scale'] = np.array(scale, np.float32) if options['scale'] == 'array' else scale
    kwargs |= {'qk_norm': options['norm']} if 'norm' in options else {}
    kwargs |= {'logits_soft_cap': 1.5} if 'cap' in options else {}
    return arrays, kwargs, random.normal(size=(B, T, N, Hv)) / math.sqrt(Hv)  # gradients of logits are about one


def _mask_arguments(combination: Combination, random: np.random.Generator) -> dict[str, Any]:
    B, T, S = combination.sizes[:3]
    options = combination.options

    def lengths(size):
        """Return lengths that are zero, full or between."""
        return np.where(random.random(B) < 0.4, random.choice([0, size, size], B), random.integers(0, size + 1, B))

    def segments(size):
        ids = random.integers(0, 3, (random.choice([1, B]), size))
        return np.sort(ids) if options['segments'] == 'packed' else ids

    make_argument = {
        'mask': lambda: {'mask': random.random(_axes_shape(options['mask'], combination.sizes)) < 0.8},
        'query_lengths': lambda: {'query_seq_lengths': lengths(T)},
        'key_lengths': lambda: {'key_value_seq_lengths': lengths(S)},
        'causal': lambda: {'is_causal': True},
        'prefix': lambda: {'prefix_lengths': lengths(S)},
        'window': lambda: {'local_window_size': options['window']},
        'segments': lambda: {'query_segment_ids': segments(T), 'key_segment_ids': segments(S)},
        'positions': lambda: _positions(options['positions'], B, T, S, random),
    }  # fmt: skip
    return {name: x for option in options if option in make_argument for name, x in make_argument[option]().items()}


def _positions(kind: str, B: int, T: int, S: int, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Return positions, for each batch row or for all rows together."""
    shift = random.integers(0, 5, (random.choice([1, B]), 1))
    queries, keys = np.arange(T)[None] + shift, np.arange(S)[None]
    if kind == 'decode':  # the last queries of a longer sequence; keys start from zero
        return {'query_positions': queries + S - T}
    if kind == 'far':
        queries, keys = queries + 10**6, keys + 10**6
    if kind == 'negative':
        queries, keys = queries - T, keys - S
    if kind == 'permuted':
        queries, keys = random.permuted(queries, axis=1), random.permuted(keys, axis=1)
    return {'query_positions': queries, 'key_positions': keys}


def _axes_shape(axes: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape for `axes` such as 'B1T1'."""
    B, T, S, N = sizes[:4]
    return tuple(1 if letter == '1' else size for letter, size in zip(axes, (B, N, T, S), strict=True))


def poison_masked_entries(arrays: dict[str, np.ndarray], kwargs: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays with NaN and infinity in every entry that the mask hides from all."""
    (B, T, N, _), (S, K) = arrays['query'].shape, arrays['key'].shape[1:3]
    visible = np.stack([[oracle.is_visible(b, n, *np.ogrid[:T, :S], **kwargs) for n in range(N)] for b in range(B)])
    key_visible = visible.any(2).reshape(B, K, N // K, S).any(2).swapaxes(1, 2)[..., None]
    poisoned = {
        'query': np.where(visible.any(3).swapaxes(1, 2)[..., None], arrays['query'], np.nan),
        'key': np.where(key_visible, arrays['key'], np.nan),
        'value': np.where(key_visible, arrays['value'], np.inf),
    }
    if 'bias' in arrays:
        broadcast_axes = tuple(axis for axis in range(4) if arrays['bias'].shape[axis] == 1)
        poisoned['bias'] = np.where(visible.any(broadcast_axes, keepdims=True), arrays['bias'], np.nan)
    return arrays | poisoned
