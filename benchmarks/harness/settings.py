"""What all contestants train, in the words of their scripts and of `rowmesh calibrate`."""

import dataclasses
from pathlib import Path

from .shapes import Shape

__all__ = ["Settings"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Rounds, steps a round, steps of a trial; and the model.

    ``goals`` leaves out contestants that no goal of a shape is about.
    """

    rounds: int
    steps: int
    trial_steps: int = 0
    cap: float = 2e5
    dim: int = 64
    batch: int = 2048
    bottom: str = "512,256,64"
    top: str = "512,512,256,1"
    batches: int = 10
    seed: int = 0
    dense_opt: str = "adagrad"
    default_malloc: bool = False
    peer: str = ""
    folder: Path = Path()
    goals: bool = False

    def script_flags(self, shape: Shape) -> list[str]:
        """For both scripts. Ten warm-up steps at a rate that trains: their losses are compared."""
        given = {
            "cap": f"{self.cap:g}",
            "dim": self.dim,
            "batch": self.batch,
            "bottom": self.bottom,
            "top": self.top,
            "batches": self.batches,
            "seed": self.seed,
            "dense-opt": self.dense_opt,
            "pooling": shape.pooling,
            "alpha": shape.alpha,
            "lr": 0.01,
            "warmup": 10,
        }
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        return [*words, *["--default-malloc"] * self.default_malloc]

    def model_settings(self) -> list[str]:
        """The same model in the words of a recipe, for `rowmesh calibrate`."""
        bottom, top = (text.rpartition(",")[0] for text in (self.bottom, self.top))
        return [
            f"data.batch_size={self.batch}",
            f"model.dim={self.dim}",
            f"model.dense_layers=[{bottom}]",
            f"model.over_layers=[{top}]",
        ]
