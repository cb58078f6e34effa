"""Application of a mixture of experts: every token through its experts, on one device or over a mesh.

Over a mesh, each device sorts its own tokens by expert.  Where experts are divided over a mesh axis, the devices of
that axis gather each other's tokens, each device multiplies the tokens that are routed to its own experts, and the sums
are scattered back.  Every device has space for all choices of the gathered tokens but works only on its own, so no
token is dropped for lack of space and no shape depends on the routing.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Bool, Float

from attnlab.kernels import derivatives, mesh_axes
from attnlab.kernels.routing import Routing, block_matmul, expert_block_size, gather_rows, sort_into_blocks

ExpertWeights = dict[str, tuple[Array, Array | None]]
"""Kernel and bias of each projection.  'up' and 'gate', or 'up' alone: [E, D, F], and [E, F] or None.  'down':
[E, F, D], and [E, D] or None."""

HiddenActivations = Callable[[Callable[[str], Array]], Array]
"""A function that computes the hidden activations.  Its argument computes a projection from its name."""


def mixture_of_experts(
    x: Float[Array, 'B T D'],
    routing: Routing,
    expert_weights: ExpertWeights,
    hidden: HiddenActivations,
    *,
    dropout_mask: Bool[Array, 'B T A F'] | None = None,
    dropout_rate: float = 0.0,
) -> Float[Array, 'B T D']:
    """Return sum_a weight_a expert_a(x) over the kept choices of each token; zero for a token without any.

    Args:
      x, expert_weights: of one dtype, which the output has too; sums are float32 or wider.
      routing: from `route_tokens`.
      hidden: computes the hidden activations from the projections.
      dropout_mask: [B, T, A, F], True for the hidden activations of each choice that dropout keeps.
      dropout_rate: the rate of that dropout; kept activations are rescaled by 1 / (1 - rate).

    Forward-mode derivatives raise NotImplementedError.
    """
    name, remedy = 'the mixture of experts', 'jax.grad and jax.vjp work'
    x, expert_weights = derivatives.reverse_mode_only((x, expert_weights), name, remedy)
    E = expert_weights['down'][0].shape[0]
    arrays = {'x': x, 'experts': routing.experts, 'weights': routing.weights, 'kept': routing.kept}
    if dropout_mask is not None:
        arrays['dropout_mask'] = dropout_mask
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not mesh.are_all_axes_auto:
        return _sum_experts(arrays, expert_weights, hidden, dropout_rate, 0, E).astype(x.dtype)
    return _sum_over_mesh(mesh, arrays, expert_weights, hidden, dropout_rate).astype(x.dtype)


def _sum_experts(
    arrays: dict[str, Array],
    expert_weights: ExpertWeights,
    hidden: HiddenActivations,
    dropout_rate: float,
    first_expert: Array | int,
    E: int,
) -> Array:
    """Return the weighted sum [B, T, D] over the experts in `expert_weights`, which are numbered from `first_expert`.

    `E` is the number of all experts; it determines the block size.
    """
    x, experts = arrays['x'], arrays['experts']
    (B, T, D), A, local_experts = x.shape, experts.shape[-1], expert_weights['down'][0].shape[0]
    is_local = arrays['kept'] & (experts >= first_expert) & (experts < first_expert + local_experts)
    size = expert_block_size(B * T * A, E)
    groups = jnp.where(is_local, experts - first_expert, local_experts).reshape(-1)
    blocks = sort_into_blocks(groups, local_experts, size)

    def project(name: str, rows: Array) -> Array:
        kernel, bias = expert_weights[name]
        y = block_matmul(rows, kernel, blocks.experts, blocks.used)
        return y if bias is None else y + bias[blocks.experts][:, None]

    rows = jnp.broadcast_to(x[:, :, None], (B, T, A, D)).reshape(B * T * A, D)
    rows = gather_rows(rows, blocks.sources, blocks.slots).reshape(-1, size, D)
    activations = hidden(lambda name: project(name, rows))
    if 'dropout_mask' in arrays:
        dropout_mask = arrays['dropout_mask'].reshape(B * T * A, -1)
        dropout_mask = dropout_mask.at[blocks.sources].get(mode='fill', fill_value=False)
        activations = jnp.where(dropout_mask.reshape(activations.shape), activations / (1.0 - dropout_rate), 0.0)
    outputs = project('down', activations).reshape(-1, D)
    outputs = gather_rows(outputs, blocks.slots, blocks.sources).reshape(B, T, A, D)
    return jnp.sum(arrays['weights'][..., None] * outputs, axis=2)


def _sum_over_mesh(
    mesh: AbstractMesh,
    arrays: dict[str, Array],
    expert_weights: ExpertWeights,
    hidden: HiddenActivations,
    dropout_rate: float,
) -> Array:
    """Return `_sum_experts` of all experts; each device computes its rows, tokens, experts and hidden activations."""
    B, T = arrays['experts'].shape[:2]
    E, F, _ = expert_weights['down'][0].shape

    def axis_if_dividing(axis: str, size: int) -> str | None:
        return axis if mesh.shape.get(axis, 1) > 1 and size % mesh.shape[axis] == 0 else None

    rows, tokens = mesh_axes.batch_axes_dividing(mesh.shape, B), axis_if_dividing(mesh_axes.SEQUENCE_AXIS, T)
    expert_axis = axis_if_dividing(mesh_axes.EXPERT_AXIS, E)
    hidden_axis = axis_if_dividing(mesh_axes.TENSOR_AXIS, F)
    gathers_tokens = expert_axis in rows  # otherwise the devices of that axis have the same tokens

    def sum_on_device(arrays: dict[str, Array], expert_weights: ExpertWeights) -> Array:
        if gathers_tokens:
            arrays = jax.tree.map(lambda x: jax.lax.all_gather(x, expert_axis, axis=0, tiled=True), arrays)
        first_expert = jax.lax.axis_index(expert_axis) * expert_weights['down'][0].shape[0] if expert_axis else 0
        kernel, bias = expert_weights['down']
        if hidden_axis and bias is not None:  # only one device of the axis adds the bias to its part of the sum
            bias = jnp.where(jax.lax.axis_index(hidden_axis) == 0, bias, 0)
            expert_weights = expert_weights | {'down': (kernel, bias)}
        y = _sum_experts(arrays, expert_weights, hidden, dropout_rate, first_expert, E)
        if hidden_axis:
            y = jax.lax.psum(y, hidden_axis)
        if gathers_tokens:
            return jax.lax.psum_scatter(y, expert_axis, scatter_dimension=0, tiled=True)
        return jax.lax.psum(y, expert_axis) if expert_axis else y

    token_spec = PartitionSpec(rows, tokens, None)
    array_specs = {name: token_spec for name in arrays}
    if 'dropout_mask' in arrays:
        array_specs['dropout_mask'] = PartitionSpec(rows, tokens, None, hidden_axis)
    up_specs = PartitionSpec(expert_axis, None, hidden_axis), PartitionSpec(expert_axis, hidden_axis)
    down_specs = PartitionSpec(expert_axis, hidden_axis), PartitionSpec(expert_axis)
    weight_specs = {name: up_specs for name in expert_weights} | {'down': down_specs}
    if expert_weights['down'][1] is None:
        weight_specs = {name: (kernel, None) for name, (kernel, _) in weight_specs.items()}
    # The replicated outputs are made equal on all devices in this file, so JAX need not check it.
    return jax.shard_map(
        sum_on_device, mesh=mesh, in_specs=(array_specs, weight_specs), out_specs=token_spec, check_vma=False,
    )(arrays, expert_weights)  # fmt: skip
