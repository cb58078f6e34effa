"""Model FLOP utilisation: the share of the devices' peak that a run reaches (Chowdhery et al. 2022, appendix B)."""

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
    # Dense matrix products in bfloat16.  Numbers "with sparsity" in the datasheets are twice as large.
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
"""Peak floating-point operations per second of one device, by the `device_kind` of JAX."""


BatchShape = tuple[jax.tree_util.PyTreeDef, tuple[tuple[tuple[int, ...], np.dtype], ...]]
"""The tree structure of a batch, and the shape and dtype of each of its arrays."""


def peak_flops(count: int, kind: str) -> float | None:
    """Return the peak of `count` devices; None if it is not known, as for CPUs, whose makers publish none."""
    return count * PEAK_FLOPS[kind] if kind in PEAK_FLOPS else None


def model_flops(loss: Callable[..., Any], params: Params, *shapes: Any) -> int:
    """Return the operations of all matrix products of a loss and its gradient with respect to `params`.

    Computed from shapes.  Products that remat computes again count once: they are counted in the tangent of the loss,
    which like the gradient has two products for each product of the loss, and which remat does not change.

    loss: (params, *arrays) -> scalar.

    Raises:
      ValueError, TypeError: as `attnlab.train.cost.product_flops`, and for functions that have a gradient and no
        tangent.
    """

    def tangent(params: Params, *args: Any) -> Any:
        return jax.jvp(lambda params: loss(params, *args), (params,), (params,))

    return product_flops(tangent, params, *shapes)


def make_flops_counter(
    loss: Callable[[Params, Batch, jax.Array], LossSums], params: Params, mapped: bool
) -> Callable[[BatchShape], float]:
    """Return a function from the shape of a batch to the `model_flops` of its step; NaN if they cannot be counted.

    Each shape is counted once and then cached.

    loss: (params, batch, PRNG key) -> loss sums.
    mapped: whether parameters and batches have a leading device axis.
    """

    def unmapped_shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape[1:] if mapped else x.shape, x.dtype)

    def merge_device_axis(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (math.prod(shape[:2]), *shape[2:]) if mapped else shape

    params = jax.tree.map(unmapped_shape, params)
    total_loss = lambda params, batch, rng: loss(params, batch, rng).total

    @functools.cache
    def count_flops(batch_shape: BatchShape) -> float:
        tree, leaves = batch_shape
        batch = tree.unflatten(jax.ShapeDtypeStruct(merge_device_axis(shape), dtype) for shape, dtype in leaves)
        try:
            return float(model_flops(total_loss, params, batch, jax.eval_shape(jax.random.key, 0)))
        except (ValueError, TypeError, NotImplementedError):  # raised for a kernel whose products cannot be counted
            return math.nan

    return count_flops


def batch_shape(batch: Batch) -> BatchShape:
    """Return the shape of a batch, which can be a dictionary key."""
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple((x.shape, x.dtype) for x in leaves)
