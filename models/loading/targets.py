"""Where each parameter of a decoder goes: shape, dtype and sharding, by name."""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..decoder import abstract_params, param_partition_specs
from ..decoder_config import DecoderConfig

Target = tuple[jax.ShapeDtypeStruct, NamedSharding]


def param_targets(
    config: DecoderConfig, dtype: jax.typing.DTypeLike, mesh: Mesh
) -> tuple[dict[str, Target], jax.tree_util.PyTreeDef]:
    """Dotted path -> shape, dtype and sharding over ``mesh``, in the order of the tree's leaves; and the tree."""
    _, abstract = abstract_params(config, dtype, mesh=mesh)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract)
    specs = jax.tree_util.tree_leaves(
        param_partition_specs(config), is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): (leaf, NamedSharding(mesh, spec))
        for (path, leaf), spec in zip(leaves, specs, strict=True)
    }, treedef
