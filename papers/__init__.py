"""Published systems, built on rowmesh and measured again: a folder a paper.

In each: README.md (claim, formula -> file, figures beside the paper's, limits), run.py, reports/.
``python -m papers`` from a checkout lists them, ``python -m papers NAME`` runs one. Nothing of
rowmesh imports from here.
"""
