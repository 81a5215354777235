"""rowmesh: recommendation models whose tables outgrow a device and whose links are slow.

Write single-device code, make a plan, shard. `docs/` explains the plan and what is exact.
"""

import rowmesh.signals  # noqa: F401  first: what follows takes seconds, and may be interrupted
from rowmesh import data, models, profile
from rowmesh.comm import Mesh, init_mesh
from rowmesh.cost import Rates, predict
from rowmesh.errors import (
    InputError,
    NotExecutable,
    PeerError,
    PlanError,
    RowmeshError,
    StepError,
)
from rowmesh.features import Batch, JaggedTensor, KeyedJaggedTensor, KeyedTensor
from rowmesh.nn import EmbeddingBagCollection, EmbeddingCollection
from rowmesh.optim import SGD, Adagrad, Adam, MomentumScaledRowwiseAdagrad, RowwiseAdagrad
from rowmesh.placement import Plan, Sync, load_plan, save_plan
from rowmesh.planners import Constraints, Pin, make_plan
from rowmesh.runtime.adoption import adopt
from rowmesh.runtime.export import full_state_dict
from rowmesh.runtime.export_files import export_safetensors
from rowmesh.runtime.load import load_full_state_dict, load_pretrained
from rowmesh.runtime.optimizer import Optimizer
from rowmesh.runtime.oracle import Oracle
from rowmesh.runtime.pipeline import Pipeline
from rowmesh.runtime.retier import change_tiers
from rowmesh.runtime.shard import shard
from rowmesh.runtime.unshard import unshard
from rowmesh.runtime.verify import verify
from rowmesh.stats import Stats
from rowmesh.tables import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from rowmesh.topology import Topology
from rowmesh.train.checkpoint import Checkpoints
from rowmesh.train.tracing import Tracing

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Batch",
    "Checkpoints",
    "Constraints",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "InputError",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "Mesh",
    "MomentumScaledRowwiseAdagrad",
    "NotExecutable",
    "Optimizer",
    "Oracle",
    "PeerError",
    "Pin",
    "Pipeline",
    "Plan",
    "PlanError",
    "PoolingType",
    "Rates",
    "RowmeshError",
    "RowwiseAdagrad",
    "Stats",
    "StepError",
    "Sync",
    "Topology",
    "Tracing",
    "adopt",
    "change_tiers",
    "data",
    "export_safetensors",
    "full_state_dict",
    "init_mesh",
    "load_full_state_dict",
    "load_plan",
    "load_pretrained",
    "make_plan",
    "models",
    "predict",
    "profile",
    "save_plan",
    "shard",
    "unshard",
    "verify",
]
__version__ = "0.1.0"
