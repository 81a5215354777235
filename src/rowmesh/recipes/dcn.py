"""The demo's data under a DCN, as a Python recipe: any code may run, any source may be made."""

from rowmesh.data import SyntheticClicks
from rowmesh.train.config import RunConfig, TrainingConfig
from rowmesh.train.model import ModelConfig
from rowmesh.train.optimiser import OptimiserConfig


def recipe() -> RunConfig:
    return RunConfig(
        data=SyntheticClicks(cap=100_000),
        model=ModelConfig(kind="dcn", dim=16, cross_layers=2, low_rank=32),
        optimiser=OptimiserConfig(warmup_steps=20),
        training=TrainingConfig(steps=300, eval_every=100),
    )
