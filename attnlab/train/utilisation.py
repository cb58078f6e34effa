"""How much of what the devices could do a run does: model FLOP utilisation (Chowdhery et al. 2022, appendix B)."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from attnlab.kernels.losses import LossSums
from attnlab.tasks.task import Batch, Params
from attnlab.train.cost import product_flops

PEAK_FLOPS = {
    # Dense products of bfloat16; datasheets that name the number "with sparsity" have twice as much.
    # www.nvidia.com: A100, H100, H200 and L4 Tensor Core GPU datasheets.
    'NVIDIA A100-SXM4-40GB': 312e12,
    'NVIDIA A100-SXM4-80GB': 312e12,
    'NVIDIA A100-PCIE-40GB': 312e12,
    'NVIDIA A100 80GB PCIe': 312e12,
    'NVIDIA H100 80GB HBM3': 989.5e12,
    'NVIDIA H100 PCIe': 756.5e12,
    'NVIDIA H200': 989.5e12,
    'NVIDIA L4': 121e12,
    # docs.cloud.google.com/tpu/docs: v4, v5e, v5p, v6e.
    'TPU v4': 275e12,
    'TPU v5 lite': 197e12,
    'TPU v5e': 197e12,
    'TPU v5': 459e12,
    'TPU v5p': 459e12,
    'TPU v6 lite': 918e12,
    'TPU v6e': 918e12,
}
"""Floating-point operations a second of a device, by what JAX calls its kind."""


BatchShape = tuple[jax.tree_util.PyTreeDef, tuple[tuple[tuple[int, ...], np.dtype], ...]]
"""The structure of a batch, and shape and dtype of each of its arrays."""


def peak_flops(count: int, kind: str) -> float | None:
    """Of so many devices; None where it is not known, as for CPUs, whose makers name none."""
    return count * PEAK_FLOPS[kind] if kind in PEAK_FLOPS else None


def model_flops(loss: Callable[..., Any], params: Params, *shapes: Any) -> int:
    """Operations of all products of a loss and its gradient by `params`, from shapes; what remat computes again counts
    once.

    The products are counted in the tangent of the loss, which for each of its products has two, as the gradient has.

    Raises:
      ValueError, TypeError: as `attnlab.train.cost.product_flops`, and for functions that have a gradient alone.
    """

    def tangent(params: Params, *args: Any) -> Any:
        return jax.jvp(lambda params: loss(params, *args), (params,), (params,))

    return product_flops(tangent, params, *shapes)


def make_flops_counter(
    loss: Callable[[Params, Batch, jax.Array], LossSums], params: Params, mapped: bool
) -> Callable[[BatchShape], float]:
    """`model_flops` of a step by the shape of its batch, each counted once; NaN where they cannot be counted.

    loss: (params, batch, key) -> sums.  mapped: parameters and batches have an axis of devices in front.
    """
    whole = lambda x: jax.ShapeDtypeStruct(x.shape[1:] if mapped else x.shape, x.dtype)
    rows = lambda size: (math.prod(size[:2]), *size[2:]) if mapped else size
    params = jax.tree.map(whole, params)
    total = lambda params, batch, rng: loss(params, batch, rng).total

    @functools.cache
    def of(shape: BatchShape) -> float:
        tree, leaves = shape
        batch = tree.unflatten(jax.ShapeDtypeStruct(rows(size), dtype) for size, dtype in leaves)
        try:
            return float(model_flops(total, params, batch, jax.eval_shape(jax.random.key, 0)))
        except (ValueError, TypeError, NotImplementedError):  # a kernel that does not show its products
            return math.nan

    return of


def batch_shape(batch: Batch) -> BatchShape:
    """The shape of a batch, to look things up by."""
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple((x.shape, x.dtype) for x in leaves)
