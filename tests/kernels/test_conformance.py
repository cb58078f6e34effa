"""One suite that every implementation of `dot_product_attention` passes: a seeded grid of calls against the oracle.

A sample of the grid runs by default, the rest with `pytest -m slow`.  The id of a test, such as
`blockwise-17-257x64-...`, says what the call combines; `pytest -m '' -k blockwise-17-` runs that one again.
"""

import functools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import dot_product_attention
from attnlab.kernels import dropout, mesh_axes
from attnlab.kernels.implementations import IMPLEMENTATION_ALIASES, IMPLEMENTATIONS
from tests.kernels import combinations, oracle
from tests.kernels.calls import attention_with_gradients, cast_arrays, split_arrays
from tests.kernels.combinations import grid_combination, make_arguments, poison_masked_entries
from tests.quick import QUICK

NAMES = [
    name for name, entry in IMPLEMENTATIONS.items()
    if entry.mesh_axis is None and jax.default_backend() in (entry.platforms or (jax.default_backend(),))
]  # fmt: skip
"""Every implementation of the table that runs here.

`ring` needs a mesh of devices whose number divides the lengths: it is judged by the same oracle in `test_ring.py`.
"""
COMPLETE = ('dense', 'blockwise')
"""Implementations that serve every call of the grid; others may refuse one, if they name one of its arguments."""

GRID = range(420)
SAMPLE = (
    17, 25, 29, 36, 37, 51, 52, 63, 72, 96, 109, 117, 122, 123, 137, 169, 172, 207, 209, 213, 214, 215, 222, 226, 233,
    264, 322, 356, 367, 374, 393, 394, 402, 409, 418,
)  # fmt: skip
"""Few that have some of everything, as a test below asserts."""


def called(seeds):
    """Each implementation on the combinations of some seeds, under a name; slow outside of the sample."""
    return [
        pytest.param(name, seed, id=f'{name}-{grid_combination(seed)}', marks=() if seed in SAMPLE else pytest.mark.slow)
        for seed in seeds for name in NAMES
    ]  # fmt: skip


@functools.lru_cache(maxsize=1)  # the implementations come one after the other
def prepared(seed):
    """The arrays that an implementation is given, the oracle's other arguments, the cotangent, and what it says."""
    combined = grid_combination(seed)
    arrays, kwargs, cotangent = make_arguments(combined)
    given = cast_arrays(poison_masked_entries(arrays, kwargs) if 'junk' in combined.kinds else arrays, combined.dtype)
    arrays, cotangent = cast_arrays(arrays, combined.dtype), jnp.asarray(cotangent, combined.dtype)
    factor, (B, T, S, N) = None, combined.sizes[:4]
    if 'dropout' in combined.kinds:
        factor = oracle.dropout_factors(dropout.dropout_seed(jax.random.key(seed)), combined.kinds['dropout'], (B, N, T, S))
    return given, kwargs, cotangent, oracle.attention(**arrays, **kwargs, factor=factor, cotangent=cotangent)


@functools.cache
def refused(implementation):
    """The options among these that the implementation refuses whatever the call."""
    options, names = {'return_weights': True, 'return_residual': True, 'block_sizes': (128, 128)}, set()
    x = jax.ShapeDtypeStruct((1, 2, 1, 8), 'bfloat16')  # a dtype that every implementation takes
    for name, value in options.items():
        attend = functools.partial(dot_product_attention, implementation=implementation, **{name: value})
        try:
            jax.eval_shape(attend, x, x, x)
        except NotImplementedError as error:
            names.add(re.search(f'{implementation}: (\\w+)', str(error))[1])
    return names


def program(implementation, seed):
    """() to (output, residual, weights or None, gradients) of the call; compiled, all arrays being arguments."""
    combined, (given, kwargs, cotangent, _) = grid_combination(seed), prepared(seed)
    offered = {'return_residual': True, 'return_weights': True, 'block_sizes': combined.blocks}
    moving, fixed = split_arrays(kwargs | {name: x for name, x in offered.items() if name not in refused(implementation)})
    call = lambda arrays, rng, moving, cotangent: attention_with_gradients(
        arrays, moving, cotangent, **fixed, implementation=implementation, dropout_rng=rng,
        dropout_rate=combined.kinds.get('dropout', 0.0),
    )  # fmt: skip
    quick = jax.default_backend() == 'cpu' and seed % 16 != 1
    compiled = jax.jit(call, compiler_options=QUICK if quick else None)
    return functools.partial(compiled, given, jax.random.key(seed), moving, cotangent)


@pytest.mark.parametrize('implementation, seed', called(GRID))
def test_equals_the_formula_forward_and_backward(implementation, seed):
    given, kwargs, _, judged = prepared(seed)
    try:
        results = program(implementation, seed)()
    except NotImplementedError as error:
        argument = re.search(f'{implementation}: (\\w+)', str(error))[1]
        assert implementation not in COMPLETE and argument in {**given, **kwargs, **grid_combination(seed).kinds}, error
        pytest.skip(str(error))
    oracle.check_results(*results, judged, given)
    if seed not in SAMPLE:
        jax.clear_caches()  # hundreds of programs, none of which comes back


@pytest.mark.parametrize('implementation, seed', called(SAMPLE[:3]))
def test_the_same_call_gives_the_same_bits(implementation, seed):
    again = program(implementation, seed)
    first = again()
    for _ in range(4):
        jax.tree.map(np.testing.assert_array_equal, first, again())


def test_what_an_implementation_cannot_serve_it_refuses():
    assert {name: refused(name) for name in COMPLETE} == {'dense': {'block_sizes'}, 'blockwise': {'return_weights'}}
    assert all(('return_weights' in refused(name)) != IMPLEMENTATIONS[name].gives_weights for name in NAMES)


def test_the_docs_have_a_row_for_each():
    page = Path('docs/attention.md').read_text('utf-8')
    assert all(f"| `'{name}'` |" in page for name in IMPLEMENTATIONS)


def test_the_table_is_read_without_jax():
    script = 'import sys; from attnlab.kernels.implementations import IMPLEMENTATION_CHOICES; print(*IMPLEMENTATION_CHOICES, "jax" in sys.modules)'
    printed = subprocess.run([sys.executable, '-c', script], check=True, capture_output=True, text=True).stdout.split()
    assert (
        printed == ['auto', *IMPLEMENTATIONS, *IMPLEMENTATION_ALIASES, 'False']
        and mesh_axes.SEQUENCE_AXIS == IMPLEMENTATIONS['ring'].mesh_axis
    )


def test_the_oracles_dropout_is_the_published_threefry():
    """Known answers of threefry 2x32 with 20 rounds in Random123's kat_vectors."""
    for words, key, expected in (
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ):
        assert oracle.threefry(key, [words[0]], [words[1]]) == expected


@pytest.mark.parametrize('seeds, least', [(GRID, 30), (SAMPLE, 5)], ids=['grid', 'sample'])
def test_the_grid_has_some_of_everything(seeds, least):
    used, alone = Counter(), Counter()
    for combined in map(grid_combination, seeds):
        _, (_, T, S, N, K, H, Hv), dtype, blocks, kinds = combined
        used.update([dtype, blocks, (N, K), ('T', T), ('S', S), ('H', H), ('Hv', Hv), *kinds, *kinds.items()])
        rules = kinds.keys() & set(combinations.MASKS)
        if dtype == 'float32' and len(rules) < 2 and 1 not in combinations.tile_counts(combined.sizes, blocks):
            alone.update(rules or ['none'])  # shows a tile that is skipped, or not masked, and should be
    names = (*combinations.DTYPES, *combinations.MASKS, *combinations.OTHERS, 'low', 'places')
    assert not [name for name in names if used[name] < least]
    assert not [name for name in (*combinations.MASKS, 'none') if alone[name] < 2]
    variants = {'T': combinations.LENGTHS, 'S': combinations.LENGTHS, 'H': combinations.WIDTHS}
    variants |= {'Hv': combinations.WIDTHS, **combinations.VARIANTS} if seeds == GRID else {}
    each = [(name, variant) for name, several in variants.items() for variant in several]
    assert not [name for name in (*combinations.BLOCKS, *combinations.HEADS, *each) if not used[name]]
