"""Data to train on: clicks and sequences, synthetic with a planted truth or read from files."""

from rowmesh.data.columns import features_from_columns
from rowmesh.data.parquet import ParquetClicks
from rowmesh.data.sequences import ItemSequences
from rowmesh.data.source import Source
from rowmesh.data.synthetic import CRITEO_KAGGLE, EVAL_STEP, LabelModel, SyntheticClicks
from rowmesh.data.synthetic_sequences import SyntheticSequences

__all__ = [
    "CRITEO_KAGGLE",
    "EVAL_STEP",
    "ItemSequences",
    "LabelModel",
    "ParquetClicks",
    "Source",
    "SyntheticClicks",
    "SyntheticSequences",
    "features_from_columns",
]
