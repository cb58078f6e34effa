"""Random attention calls: `combination(seed)` of the grid that judges every implementation, `small(seed)`, `fill`."""

import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from tests.kernels import oracle
from tests.kernels.calls import drawn

LENGTHS = (1, 2, 7, 33, 64, 127, 255, 256, 257, 1025)
HEADS = ((1, 1), (2, 1), (4, 2), (4, 4), (6, 3))
WIDTHS = (1, 2, 3, 16, 31, 64, 80, 128, 256)
BLOCKS = (None, (16, 32), (32, 16), (64, 128), (512, 2048), (8, 8))
DTYPES = ('float32', 'bfloat16', 'float16')
MASKS = ('mask', 'query_lengths', 'key_lengths', 'causal', 'prefix', 'window', 'segments')
OTHERS = ('bias', 'norm', 'cap', 'scale', 'sinks', 'alibi', 'dropout', 'junk')
AXES = tuple(map(''.join, itertools.product(*zip('BNTS', '1111', strict=True))))
SMALL = ((2, 5, 5, 4, 2, 3, 4), (2, 3, 6, 4, 1, 3, 4), (1, 1, 4, 2, 2, 3, 2))
WINDOWS = (0, 1, 20, (3, 0), (0, 5), (40, 7), (2000, 0))
VARIANTS = {
    'mask': AXES, 'bias': AXES, 'window': WINDOWS, 'segments': ('packed', 'mixed'), 'norm': ('l2', 'rms'),
    'scale': ('number', 'array'), 'dropout': (0.1, 0.5), 'places': ('decode', 'far', 'permuted', 'negative'),
}  # fmt: skip
"""Of the rules and other arguments that come in several; the rest is there or not."""


class Combination(NamedTuple):
    """sizes: B, T, S, N, K, H, Hv.  blocks: for implementations that have them.  kinds: what is used, and how."""

    seed: int
    sizes: tuple[int, ...]
    dtype: str
    blocks: tuple[int, int] | None
    kinds: dict[str, Any]

    def __str__(self) -> str:
        B, T, S, N, K, H, Hv = self.sizes
        blocks = 'x'.join(map(str, self.blocks)) if self.blocks else 'own'
        kinds = [name if kind is True else f'{name}_{kind}' for name, kind in self.kinds.items()]
        name = '-'.join([f'{self.seed}-{T}x{S}-B{B}-N{N}K{K}-H{H}v{Hv}-{blocks}-{self.dtype}', *kinds])
        return name.translate({ord(letter): '_' if letter == ',' else None for letter in ' (),'})


def combination(seed: int) -> Combination:
    """What the call of a seed is made of: up to three rules of who sees whom, and of everything else about a third."""
    random = np.random.default_rng((79, seed))
    pick = lambda options: options[random.integers(len(options))]
    some = lambda part=0.3: random.random() < part
    sizes = ()
    while not sizes or math.prod(sizes[:4]) > 2 * 1025**2:
        H = pick(WIDTHS)
        sizes = pick((1, 2, 3)), pick(LENGTHS), pick(LENGTHS), *pick(HEADS), H, H if some(0.7) else pick(WIDTHS)
    rules = sorted({pick((*MASKS, 'mask', 'window')) for _ in range(pick((0, 1, 2, 3)))})
    others = [name for name in OTHERS if some()]
    kinds = {name: pick(VARIANTS.get(name, (True,))) for name in (*rules, *others)}
    kinds |= {'low': True} if 'bias' in kinds and some() else {}
    compares = {'causal', 'prefix', 'window', 'alibi'} & kinds.keys()
    kinds |= {'places': pick(VARIANTS['places'])} if compares and some() else {}
    # Two tiles or more in each direction where it can be; thousands of them take long and show nothing new.
    cut = {blocks: tiles(sizes, blocks) for blocks in BLOCKS}
    several = [blocks for blocks in BLOCKS if 1 not in cut[blocks] and math.prod(cut[blocks]) < 1000]
    blocks = pick(several if several and some(0.8) else BLOCKS[:-1])
    return Combination(seed, sizes, pick(DTYPES[:1] * 3 + DTYPES), blocks, kinds)


def small(seed: int, additive: bool = False) -> Combination:
    """A call of few shapes, because each is compiled; with a `score`, of additive attention."""
    random = np.random.default_rng((81, seed))
    some = lambda part: random.random() < part
    rules = [name for name in MASKS if name != 'prefix' and some(0.35)]
    others = [name for name in ('norm', 'cap', 'scale', 'sinks', 'alibi') if some(0.3) and not additive]
    kinds = {name: VARIANTS.get(name, (True,)) for name in (*rules, *others, *(['bias'] if some(0.5) else []))}
    kinds |= {name: ('BNTS', '1N1S', 'B1T1', '11TS') for name in ('mask', 'bias') if name in kinds}
    kinds |= {'places': VARIANTS['places']} if some(0.5) else {}
    kinds = {name: options[random.integers(len(options))] for name, options in kinds.items()}
    kinds |= {'score': True} if additive else {}
    return Combination(seed, SMALL[seed % len(SMALL)], 'float32', None, kinds)


def tiles(sizes: tuple[int, ...], blocks: tuple[int, int] | None) -> tuple[int, int]:
    """How many blocks of queries and of keys there are; one of each where an implementation chooses."""
    return (-(-sizes[1] // blocks[0]), -(-sizes[2] // blocks[1])) if blocks else (1, 1)


def fill(combined: Combination) -> tuple[dict[str, np.ndarray], dict[str, Any], np.ndarray]:
    """The oracle's arguments: arrays that have gradients, all others, and the cotangent of the output."""
    random = np.random.default_rng((80, combined.seed))
    B, T, S, N, _, H, Hv = combined.sizes
    kinds = combined.kinds
    arrays = drawn(combined.sizes, random)
    kwargs = _rules(combined, random)
    if 'bias' in kinds:
        arrays['bias'] = random.normal(size=_shape(kinds['bias'], combined.sizes))
        arrays['bias'][random.random(arrays['bias'].shape) < 0.2 * ('low' in kinds)] = -np.inf
    if 'score' in kinds:
        arrays['score'] = random.normal(size=(N, H))
    if 'sinks' in kinds:
        arrays['sinks'] = 2 * random.normal(size=N)
    if 'alibi' in kinds:  # logits of some tens at most: of larger ones, float32 keeps too few digits behind the point
        steps = oracle.ahead(np.arange(B)[:, None, None], *np.ogrid[:T, :S], **kwargs)
        arrays['alibi_slopes'] = random.uniform(0.3, 1, N) * min(0.5, 20 / max(1, np.abs(steps).max()))
    if 'scale' in kinds:
        scale = 5.0 if kinds.get('norm') == 'l2' else 1.4 / math.sqrt(H)
        kwargs['scale'] = np.array(scale, np.float32) if kinds['scale'] == 'array' else scale
    kwargs |= {'qk_norm': kinds['norm']} if 'norm' in kinds else {}
    kwargs |= {'logits_soft_cap': 1.5} if 'cap' in kinds else {}
    return arrays, kwargs, random.normal(size=(B, T, N, Hv)) / math.sqrt(Hv)  # slopes of logits about one


def _rules(combined: Combination, random: np.random.Generator) -> dict[str, Any]:
    B, T, S = combined.sizes[:3]
    kinds = combined.kinds

    def lengths(size):  # of all, of none and of some
        return np.where(random.random(B) < 0.4, random.choice([0, size, size], B), random.integers(0, size + 1, B))

    def segments(size):
        ids = random.integers(0, 3, (random.choice([1, B]), size))
        return np.sort(ids) if kinds['segments'] == 'packed' else ids

    make = {
        'mask': lambda: {'mask': random.random(_shape(kinds['mask'], combined.sizes)) < 0.8},
        'query_lengths': lambda: {'query_seq_lengths': lengths(T)},
        'key_lengths': lambda: {'key_value_seq_lengths': lengths(S)},
        'causal': lambda: {'is_causal': True},
        'prefix': lambda: {'prefix_lengths': lengths(S)},
        'window': lambda: {'local_window_size': kinds['window']},
        'segments': lambda: {'query_segment_ids': segments(T), 'key_segment_ids': segments(S)},
        'places': lambda: _places(kinds['places'], B, T, S, random),
    }  # fmt: skip
    return {name: x for kind in kinds if kind in make for name, x in make[kind]().items()}


def _places(kind: str, B: int, T: int, S: int, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Positions, of each row its own or of all the same."""
    apart = random.integers(0, 5, (random.choice([1, B]), 1))
    queries, keys = np.arange(T)[None] + apart, np.arange(S)[None]
    if kind == 'decode':  # the last queries of a longer sequence, keys counted from zero as ever
        return {'query_positions': queries + S - T}
    if kind == 'far':
        queries, keys = queries + 10**6, keys + 10**6
    if kind == 'negative':
        queries, keys = queries - T, keys - S
    if kind == 'permuted':
        queries, keys = random.permuted(queries, axis=1), random.permuted(keys, axis=1)
    return {'query_positions': queries, 'key_positions': keys}


def _shape(axes: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """`axes`, such as B1T1, as numbers."""
    B, T, S, N = sizes[:4]
    return tuple(1 if letter == '1' else size for letter, size in zip(axes, (B, N, T, S), strict=True))


def spoil(arrays: dict[str, np.ndarray], kwargs: dict[str, Any]) -> dict[str, np.ndarray]:
    """The arrays with NaN and infinity in every slot that the rules keep everybody from seeing."""
    (B, T, N, _), (S, K) = arrays['query'].shape, arrays['key'].shape[1:3]
    seen = np.stack([[oracle.visible(b, n, *np.ogrid[:T, :S], **kwargs) for n in range(N)] for b in range(B)])
    grouped = seen.any(2).reshape(B, K, N // K, S).any(2).swapaxes(1, 2)[..., None]
    filled = {
        'query': np.where(seen.any(3).swapaxes(1, 2)[..., None], arrays['query'], np.nan),
        'key': np.where(grouped, arrays['key'], np.nan),
        'value': np.where(grouped, arrays['value'], np.inf),
    }
    if 'bias' in arrays:
        small = tuple(axis for axis in range(4) if arrays['bias'].shape[axis] == 1)
        filled['bias'] = np.where(seen.any(small, keepdims=True), arrays['bias'], np.nan)
    return arrays | filled
