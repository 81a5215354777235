"""Data to train on: synthetic clicks with a planted truth."""

from rowmesh.data.source import Source
from rowmesh.data.synthetic import CRITEO_KAGGLE, EVAL_STEP, LabelModel, SyntheticClicks

__all__ = ["CRITEO_KAGGLE", "EVAL_STEP", "LabelModel", "Source", "SyntheticClicks"]
