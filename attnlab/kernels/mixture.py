"""A mixture of experts applied: every token through its experts, on one device or over the axes of a mesh.

Over a mesh each device sorts its own tokens.  Where experts are divided, the devices of that axis see each other's
tokens, each multiplies those that come to its own experts, and the sums go back.  No token is dropped for want of room,
and no shape depends on where they go: each of these devices has room for all their choices, and works on those it has.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Bool, Float

from attnlab.kernels import derivatives, mesh_axes
from attnlab.kernels.routing import Routing, block_matmul, expert_block_size, gather_rows, sort_into_blocks

ExpertWeights = dict[str, tuple[Array, Array | None]]
"""'up' and 'gate', or 'up' alone: kernel [E, D, F] and bias [E, F] or None.  'down': [E, F, D] and [E, D] or None."""

HiddenActivations = Callable[[Callable[[str], Array]], Array]
"""The hidden activations from the products with the matrices that it names."""


def mixture_of_experts(
    x: Float[Array, 'B T D'],
    routing: Routing,
    matrices: ExpertWeights,
    hidden: HiddenActivations,
    *,
    keep: Bool[Array, 'B T A F'] | None = None,
    rate: float = 0.0,
) -> Float[Array, 'B T D']:
    """sum_a weight_a expert_a(x) over the choices of each token that are kept, zero where none is.

    x, matrices: of one dtype, which the output has; sums are float32 or wider.
    keep, rate: of dropout, which hidden activations of a choice stay, and how many do not.
    """
    name, remedy = 'the mixture of experts', 'jax.grad and jax.vjp work'
    x, matrices = derivatives.reverse_mode_only((x, matrices), name, remedy)
    E = matrices['down'][0].shape[0]
    arrays = {'x': x, 'experts': routing.experts, 'weights': routing.weights, 'kept': routing.kept}
    if keep is not None:
        arrays['keep'] = keep
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not mesh.are_all_axes_auto:
        return _sums(arrays, matrices, hidden, rate, 0, E).astype(x.dtype)
    return _over(mesh, arrays, matrices, hidden, rate).astype(x.dtype)


def _sums(
    arrays: dict[str, Array],
    matrices: ExpertWeights,
    hidden: HiddenActivations,
    rate: float,
    first: Array | int,
    E: int,
) -> Array:
    """[B, T, D] of those of the E experts whose matrices these are, from number `first` on."""
    x, experts = arrays['x'], arrays['experts']
    (B, T, D), A, here = x.shape, experts.shape[-1], matrices['down'][0].shape[0]
    own = arrays['kept'] & (experts >= first) & (experts < first + here)
    size = expert_block_size(B * T * A, E)
    places = sort_into_blocks(jnp.where(own, experts - first, here).reshape(-1), here, size)

    def project(name: str, rows: Array) -> Array:
        kernel, bias = matrices[name]
        y = block_matmul(rows, kernel, places.experts, places.used)
        return y if bias is None else y + bias[places.experts][:, None]

    rows = jnp.broadcast_to(x[:, :, None], (B, T, A, D)).reshape(B * T * A, D)
    rows = gather_rows(rows, places.sources, places.slots).reshape(-1, size, D)
    inside = hidden(lambda name: project(name, rows))
    if 'keep' in arrays:
        keep = arrays['keep'].reshape(B * T * A, -1).at[places.sources].get(mode='fill', fill_value=False)
        inside = jnp.where(keep.reshape(inside.shape), inside / (1.0 - rate), 0.0)
    outside = project('down', inside).reshape(-1, D)
    each = gather_rows(outside, places.slots, places.sources).reshape(B, T, A, D)
    return jnp.sum(arrays['weights'][..., None] * each, axis=2)


def _over(
    mesh: AbstractMesh, arrays: dict[str, Array], matrices: ExpertWeights, hidden: HiddenActivations, rate: float
) -> Array:
    """`_sums` of all experts, each device with its rows, tokens, experts and hidden activations."""
    B, T = arrays['experts'].shape[:2]
    E, F, _ = matrices['down'][0].shape
    fits = lambda axis, size: axis if mesh.shape.get(axis, 1) > 1 and size % mesh.shape[axis] == 0 else None
    rows, tokens = mesh_axes.batch_axes_dividing(mesh.shape, B), fits(mesh_axes.SEQUENCE_AXIS, T)
    among, within = fits(mesh_axes.EXPERT_AXIS, E), fits(mesh_axes.TENSOR_AXIS, F)
    exchanged = among in rows  # else the devices of that axis have the same tokens

    def part(arrays: dict[str, Array], matrices: ExpertWeights) -> Array:
        if exchanged:
            arrays = jax.tree.map(lambda x: jax.lax.all_gather(x, among, axis=0, tiled=True), arrays)
        first = jax.lax.axis_index(among) * matrices['down'][0].shape[0] if among else 0
        kernel, bias = matrices['down']
        if within and bias is not None:  # of the parts of a sum, one has it
            matrices = matrices | {'down': (kernel, jnp.where(jax.lax.axis_index(within) == 0, bias, 0))}
        y = _sums(arrays, matrices, hidden, rate, first, E)
        if within:
            y = jax.lax.psum(y, within)
        if exchanged:
            return jax.lax.psum_scatter(y, among, scatter_dimension=0, tiled=True)
        return jax.lax.psum(y, among) if among else y

    of_token = PartitionSpec(rows, tokens, None)
    of_arrays = {name: of_token for name in arrays} | {'keep': PartitionSpec(rows, tokens, None, within)}
    into = PartitionSpec(among, None, within), PartitionSpec(among, within)
    of_matrices = {name: into for name in matrices} | {'down': (PartitionSpec(among, within), PartitionSpec(among))}
    if matrices['down'][1] is None:
        of_matrices = {name: (kernel, None) for name, (kernel, _) in of_matrices.items()}
    # All that is replicated is made the same on every device, in this file: nothing here is left for JAX to check.
    return jax.shard_map(
        part, mesh=mesh, in_specs=({name: of_arrays[name] for name in arrays}, of_matrices), out_specs=of_token,
        check_vma=False,
    )(arrays, matrices)  # fmt: skip
