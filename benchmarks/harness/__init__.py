"""The one harness of races, ablations and papers: arms in turn, a JSON a cell, medians, a page.

Arms are models of ours side by side in one process a rank (`beside`, run on hosts by `hosts`), or a
torchrun each that waits at a gate (`contestants`, run by `turns`). What both share: the order of
turns (`turns`), stored cells (`cells`), medians with intervals (`figures`), Markdown (`pages`), how
flags are read and how a bad one ends (`options`). Scripts import it as ``harness``, papers as
``benchmarks.harness``: here imports are relative.
"""
