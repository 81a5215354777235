"""TorchRec's collections, known by their attributes, become rowmesh's."""

from torch import nn

from rowmesh.nn.collections import Collection, EmbeddingBagCollection, EmbeddingCollection
from rowmesh.tables import is_weighted, named_collections

__all__ = ["adopt_collections"]


def adopt_collections(model: nn.Module) -> nn.Module:
    """Replace foreign collections by ours, with their values; returns the model.

    The model itself is returned, or its replacement if it is a foreign collection.
    """
    for path, module, configs in list(named_collections(model)):
        if isinstance(module, Collection):
            continue
        is_bags = hasattr(module, "embedding_bag_configs")
        foreign = module.embedding_bags if is_bags else module.embeddings
        devices = {foreign[c.name].weight.device for c in configs}
        ours: EmbeddingBagCollection | EmbeddingCollection
        if is_bags:
            ours = EmbeddingBagCollection(
                configs,  # type: ignore[arg-type]
                device="meta",
                is_weighted=is_weighted(module),
            )
        else:
            ours = EmbeddingCollection(configs, device="meta")  # type: ignore[arg-type]
        for config in configs if all(d.type != "meta" for d in devices) else ():
            ours.table_modules()[config.name].weight = foreign[config.name].weight
        if not path:
            return ours
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, ours)
    return model
