"""The baseline of the sequence recipes: rank candidates by how often they were taken in training.

::

    python benchmarks/bench_popularity.py sequences --data FILE

Held-out groups, negatives and metrics are those of `rowmesh train RECIPE`. An item's score is the
number of times it is in the training part, as first item of a user or as one to predict; equal
counts are ordered at random, once for all groups, since ties would count against the positive.
Prints one JSON line.
"""

import argparse
import itertools
import json
import platform
import subprocess
from typing import Any

import torch
from torch import Tensor

from rowmesh.data import ItemSequences
from rowmesh.train.metrics import ClickMetrics
from rowmesh.train.ranking import RankingMetrics
from rowmesh.train.recipes import load_recipe


def count_items(data: ItemSequences) -> Tensor:
    """How often each item is in the part to train on."""
    counts = torch.zeros(data.num_items, dtype=torch.float64)
    for batch in itertools.islice(data.batches(rank=0, world=1), data.steps_per_epoch):
        features, is_positive = batch.sparse_features, batch.labels == 1
        history = features["history"]
        firsts = history.values()[history.offsets()[:-1][is_positive & (history.lengths() == 1)]]
        taken = torch.cat((features["candidate"].values()[is_positive], firsts))
        counts += torch.bincount(taken, minlength=len(counts))
    return counts


def main() -> None:
    """Count, rank, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--data", required=True)
    parser.add_argument("--set", dest="extra", action="append", default=[])
    args = parser.parse_args()
    data = load_recipe(args.recipe, [f"data.path={args.data}", *args.extra]).data
    assert isinstance(data, ItemSequences)
    generator = torch.Generator().manual_seed(0)
    scores = count_items(data) + 0.5 * torch.rand(data.num_items, generator=generator)
    ranked, clicks = RankingMetrics(), ClickMetrics()
    for batch in data.held_out(rank=0, world=1):
        found = scores[batch.sparse_features["candidate"].values()]
        assert batch.groups is not None
        ranked.update(found, batch.labels, batch.groups)
        clicks.update(torch.log1p(found), batch.labels)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    line: dict[str, Any] = {
        "benchmark": "popularity",
        "recipe": args.recipe,
        "settings": args.extra,
        **ranked.result(),
        "auc": clicks.result()["auc"],
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
