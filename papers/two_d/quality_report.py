"""The quality of shard groups as Markdown."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.harness.pages import table, word
from papers.two_d.figures import Figures, judge

__all__ = ["figures_by_set", "render_quality", "summarise_quality"]

_SETS = {
    "planted": "8 tables of 250 rows, an additive model: rows are seen often, many by one group a "
    "step",
    "few": "8 tables of 10,000 rows, an additive model: most rows are seen a few times",
    "dcn": "the rows of `planted`, a DCN with one cross layer",
    "clicks": "display-ad clicks, the model of the recipe `clicks`, one epoch",
}
_INTRODUCTION = """\
## Quality

Virtual ranks in one process: the oracle of the plan, one group a rank, which ranks equal to the
bit. Global batch, samples, initial values and their order are those of full model parallelism
(M = 1); learning rates fall to 0 in a line. Differences are % of normalised entropy (NE) against
full on the same seed, more is worse, with the standard error of their mean and Student's 95 %
interval. KL is the mean of KL(p* || p) in 1e-3 nats.
"""
_DECILES = """\
Tenths of held-out samples by how often their rarest row is in the training data, rarest first:
% of NE against full at lr {lr:g}.
"""
_MOMENTS = """\
Tenths of rows by how often they are in the training data, rarest first: stored moment over that of
full at lr {lr:g}, geometric mean.
"""


def figures_by_set(runs: Sequence[Mapping[str, Any]]) -> list[Figures]:
    """The figures of every data set, in the order of the runs."""
    names = dict.fromkeys(run["set"] for run in runs)
    return [Figures([run for run in runs if run["set"] == name]) for name in names]


def summarise_quality(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """For every set and verdict: its sentence, and whether it holds."""
    return {
        figures.name: [
            {"verdict": str(v), "holds": v.holds, "holds_throughout": v.holds_throughout}
            for groups in _group_counts(figures)
            for v in judge(figures, groups)
        ]
        for figures in figures_by_set(runs)
    }


def render_quality(runs: Sequence[Mapping[str, Any]], proof: Mapping[str, Any] | None) -> str:
    """All sets with their verdicts, then the proof of mode gradients."""
    lines = [*_INTRODUCTION.splitlines(), ""]
    for figures in figures_by_set(runs):
        lines += _render_set(figures)
    if proof is not None:
        lines += _render_proof(proof)
    return "\n".join(lines)


def _group_counts(figures: Figures) -> list[int]:
    return sorted({groups for groups, _ in figures.arms()})


def _render_set(figures: Figures) -> list[str]:
    lr, seeds = figures.rates[0], ", ".join(map(str, figures.seeds))
    verdicts = [v for groups in _group_counts(figures) for v in judge(figures, groups)]
    rows = [
        [v.groups, v.demand, v.figure, word(v.holds), word(v.holds_throughout)] for v in verdicts
    ]
    heads = ["M", "must show", "% NE [95 %]", "does", "all of the interval"]
    lines = [f"### {figures.name}", "", f"{_SETS.get(figures.name, '')}.", f"Seeds {seeds}.", ""]
    lines += [*table(heads, rows, left=5), "", *_render_best(figures), "", *_render_all(figures)]
    if figures.arms(period_1=False):
        lines += ["", *_render_periods(figures)]
    lines += ["", *_DECILES.format(lr=lr).splitlines(), "", *_table_of_deciles(figures, lr, True)]
    lines += ["", *_MOMENTS.format(lr=lr).splitlines(), "", *_table_of_deciles(figures, lr, False)]
    return [*lines, ""]


def _render_best(figures: Figures) -> list[str]:
    rows = []
    for groups, arm in [(1, "full"), *figures.arms()]:
        lr = figures.best_rate(groups, arm)
        ne, auc = (fmean(figures.values(key, groups, arm, lr)) for key in ("ne", "auc"))
        loss = "" if groups == 1 else str(figures.loss_at_best(groups, arm))
        rows.append([groups, arm, f"{lr:g}", f"{ne:.5f}", f"{auc:.5f}", loss])
    heads = ["M", "arm", "best lr", "NE", "AUC", "% NE against full [95 %]"]
    return ["Each arm at its best rate, against full at its best:", "", *table(heads, rows, left=2)]


def _render_all(figures: Figures) -> list[str]:
    rows = [
        _row(figures, groups, arm, lr)
        for groups, arm in [(1, "full"), *figures.arms()]
        for lr in figures.rates_of(groups, arm)
    ]
    known = [value for value in figures.values("bayes_ne", 1, "full", figures.rates[0]) if value]
    bayes = f"NE of p* itself: {fmean(known):.5f}." if known else "The truth is not known."
    return ["All rates, against full at the same rate:", "", *_table_of_arms(rows), "", bayes]


def _table_of_arms(rows: list[list[object]]) -> list[str]:
    return table(["M", "arm", "lr", "NE", "AUC", "KL", "% NE", "s.e.", "95 %"], rows, left=2)


def _row(figures: Figures, groups: int, arm: str, lr: float) -> list[object]:
    ne, auc = (fmean(figures.values(key, groups, arm, lr)) for key in ("ne", "auc"))
    truths = [kl for kl in figures.values("mean_kl", groups, arm, lr) if kl is not None]
    kl = f"{1e3 * fmean(truths):.2f}" if truths else "-"
    cells = ["", "", ""]
    if groups > 1:
        loss = figures.loss(groups, arm, lr)
        cells = [f"{loss.mean:+.3f}", f"{loss.error:.3f}", f"[{loss.low:+.3f}, {loss.high:+.3f}]"]
    return [groups, arm, f"{lr:g}", f"{ne:.5f}", f"{auc:.5f}", kl, *cells]


def _render_periods(figures: Figures) -> list[str]:
    others = figures.arms(period_1=False)
    firsts = [(groups, arm.rpartition(" k=")[0]) for groups, arm in others]
    rows = [
        _row(figures, groups, arm, figures.rates[0])
        for groups, arm in dict.fromkeys([*firsts, *others])
    ]
    return ["Sync every k steps, against full at the same rate:", "", *_table_of_arms(rows)]


def _table_of_deciles(figures: Figures, lr: float, is_loss: bool) -> list[str]:
    rows = []
    for groups, arm in figures.arms():
        values = (figures.decile_losses if is_loss else figures.moment_ratios)(groups, arm, lr)
        form = "{:+.1f}" if is_loss else "{:.2f}"
        cells = ["-" if value is None else form.format(value) for value in values]
        rows.append([groups, arm.removeprefix("weights "), *cells])
    return table(["M", "arm", *map(str, range(1, 11))], rows, left=2)


def _render_proof(proof: Mapping[str, Any]) -> list[str]:
    rows = []
    for row in proof["rows"]:
        same = word(row["weights"] == row["moments"] == 0.0)
        rows.append([row["groups"], f"{row['weights']:g}", f"{row['moments']:g}", same])
    return [
        "### Mode gradients",
        "",
        "Against full model parallelism on as many virtual ranks, `planted`, seed "
        f"{proof['seed']}, {proof['steps']} steps:",
        "largest difference of any weight and of any moment.",
        "",
        *table(["M", "weights", "moments", "equal to the bit"], rows),
        "",
    ]
