"""Data to train on: synthetic clicks with a planted truth, Parquet files, columns of your own."""

from rowmesh.data.columns import features_from_columns
from rowmesh.data.parquet import ParquetClicks
from rowmesh.data.source import Source
from rowmesh.data.synthetic import CRITEO_KAGGLE, EVAL_STEP, LabelModel, SyntheticClicks

__all__ = [
    "CRITEO_KAGGLE",
    "EVAL_STEP",
    "LabelModel",
    "ParquetClicks",
    "Source",
    "SyntheticClicks",
    "features_from_columns",
]
