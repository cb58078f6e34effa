"""The suite that every implementation of `dot_product_attention` must pass: a seeded grid of calls against the oracle.

A sample of the grid runs by default, the rest with `pytest -m slow`.  The id of a test, such as
`blockwise-17-257x64-...`, lists the options of the call; `pytest -m '' -k blockwise-17-` runs that test alone.
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
"""All implementations that run on this machine, except `ring`.

`ring` needs a mesh of devices whose number divides the lengths; `test_ring.py` compares it with the same oracle.
"""
COMPLETE = ('dense', 'blockwise')
"""Implementations that support every call of the grid; others may raise an error that names one of its arguments."""

GRID = range(420)
SAMPLE = (
    17, 25, 29, 36, 37, 51, 52, 63, 72, 96, 109, 117, 122, 123, 137, 169, 172, 207, 209, 213, 214, 215, 222, 226, 233,
    264, 322, 356, 367, 374, 393, 394, 402, 409, 418,
)  # fmt: skip
"""A small part of the grid that contains every option, as a test below checks."""


def implementation_cases(seeds):
    """Return test parameters, with ids, for each implementation and seed; slow outside of the sample."""
    marks = {seed: () if seed in SAMPLE else pytest.mark.slow for seed in seeds}
    return [
        pytest.param(name, seed, id=f'{name}-{grid_combination(seed)}', marks=marks[seed])
        for seed in seeds for name in NAMES
    ]  # fmt: skip


@functools.lru_cache(maxsize=1)  # the implementations run one after the other on the same seed
def arguments_and_reference(seed):
    """Return the arrays for an implementation, the other arguments, the cotangent, and the oracle's results."""
    combination = grid_combination(seed)
    arrays, kwargs, cotangent = make_arguments(combination)
    inputs = poison_masked_entries(arrays, kwargs) if 'poison' in combination.options else arrays
    inputs = cast_arrays(inputs, combination.dtype)
    arrays, cotangent = cast_arrays(arrays, combination.dtype), jnp.asarray(cotangent, combination.dtype)
    factors, (B, T, S, N) = None, combination.sizes[:4]
    if 'dropout' in combination.options:
        rate = combination.options['dropout']
        factors = oracle.dropout_factors(dropout.dropout_seed(jax.random.key(seed)), rate, (B, N, T, S))
    reference = oracle.attention(**arrays, **kwargs, factors=factors, cotangent=cotangent)
    return inputs, kwargs, cotangent, reference


@functools.cache
def unsupported_options(implementation):
    """Return the options, of three, that the implementation never supports."""
    options, names = {'return_weights': True, 'return_residual': True, 'block_sizes': (128, 128)}, set()
    x = jax.ShapeDtypeStruct((1, 2, 1, 8), 'bfloat16')  # a dtype that every implementation takes
    for name, value in options.items():
        attend = functools.partial(dot_product_attention, implementation=implementation, **{name: value})
        try:
            jax.eval_shape(attend, x, x, x)
        except NotImplementedError as error:
            names.add(re.search(f'{implementation}: (\\w+)', str(error))[1])
    return names


def compiled_call(implementation, seed):
    """Return a function without arguments that runs the compiled call.

    It returns (output, residual, weights or None, gradients).  All arrays are arguments of the program, not constants.
    """
    combination, (inputs, kwargs, cotangent, _) = grid_combination(seed), arguments_and_reference(seed)
    options = {'return_residual': True, 'return_weights': True, 'block_sizes': combination.blocks}
    unsupported = unsupported_options(implementation)
    traced, static = split_arrays(kwargs | {name: x for name, x in options.items() if name not in unsupported})
    call = lambda arrays, rng, traced, cotangent: attention_with_gradients(
        arrays, traced, cotangent, **static, implementation=implementation, dropout_rng=rng,
        dropout_rate=combination.options.get('dropout', 0.0),
    )  # fmt: skip
    quick = jax.default_backend() == 'cpu' and seed % 16 != 1
    compiled = jax.jit(call, compiler_options=QUICK if quick else None)
    return functools.partial(compiled, inputs, jax.random.key(seed), traced, cotangent)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('implementation, seed', implementation_cases(GRID))
def test_output_and_gradients_match_oracle(implementation, seed):
    inputs, kwargs, _, reference = arguments_and_reference(seed)
    try:
        results = compiled_call(implementation, seed)()
    except NotImplementedError as error:
        argument = re.search(f'{implementation}: (\\w+)', str(error))[1]
        assert implementation not in COMPLETE, error
        assert argument in {**inputs, **kwargs, **grid_combination(seed).options}, error
        pytest.skip(str(error))
    oracle.check_results(*results, reference, inputs)
    if seed not in SAMPLE:
        jax.clear_caches()  # hundreds of programs, each used once


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('implementation, seed', implementation_cases(SAMPLE[:3]))
def test_repeated_call_gives_the_same_bits(implementation, seed):
    run = compiled_call(implementation, seed)
    first = run()
    for _ in range(4):
        jax.tree.map(np.testing.assert_array_equal, first, run())


def test_unsupported_options_raise():
    unsupported = {name: unsupported_options(name) for name in NAMES}
    assert unsupported['dense'] == {'block_sizes'} and unsupported['blockwise'] == {'return_weights'}
    assert all(('return_weights' in unsupported[name]) != IMPLEMENTATIONS[name].returns_weights for name in NAMES)


def test_docs_have_a_row_for_each_implementation():
    page = Path('docs/attention.md').read_text('utf-8')
    assert all(f"| `'{name}'` |" in page for name in IMPLEMENTATIONS)


def test_table_of_implementations_does_not_import_jax():
    names = 'from attnlab.kernels.implementations import IMPLEMENTATION_CHOICES'
    script = f'import sys; {names}; print(*IMPLEMENTATION_CHOICES, "jax" in sys.modules)'
    printed = subprocess.run([sys.executable, '-c', script], check=True, capture_output=True, text=True).stdout.split()
    assert printed == ['auto', *IMPLEMENTATIONS, *IMPLEMENTATION_ALIASES, 'False']
    assert mesh_axes.SEQUENCE_AXIS == IMPLEMENTATIONS['ring'].mesh_axis


def test_oracle_threefry_matches_published_answers():
    """Known answers of threefry 2x32 with 20 rounds in Random123's kat_vectors."""
    for counter, key, expected in (
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ):
        assert oracle.threefry(key, [counter[0]], [counter[1]]) == expected


@pytest.mark.parametrize('seeds, least', [(GRID, 30), (SAMPLE, 5)], ids=['grid', 'sample'])
def test_grid_and_sample_contain_every_option(seeds, least):
    used, alone = Counter(), Counter()
    for combination in map(grid_combination, seeds):
        _, (_, T, S, N, K, H, Hv), dtype, blocks, options = combination
        used.update([dtype, blocks, (N, K), ('T', T), ('S', S), ('H', H), ('Hv', Hv), *options, *options.items()])
        masks = options.keys() & set(combinations.MASKS)
        if dtype == 'float32' and len(masks) < 2 and 1 not in combinations.tile_counts(combination.sizes, blocks):
            alone.update(masks or ['none'])  # such a call shows whether a tile is skipped or masked wrongly
    names = (*combinations.DTYPES, *combinations.MASKS, *combinations.OTHERS, 'low', 'positions')
    assert not [name for name in names if used[name] < least]
    assert not [name for name in (*combinations.MASKS, 'none') if alone[name] < 2]
    variants = {'T': combinations.LENGTHS, 'S': combinations.LENGTHS, 'H': combinations.WIDTHS}
    variants |= {'Hv': combinations.WIDTHS, **combinations.VARIANTS} if seeds == GRID else {}
    pairs = [(name, variant) for name, values in variants.items() for variant in values]
    assert not [name for name in (*combinations.BLOCKS, *combinations.HEADS, *pairs) if not used[name]]
