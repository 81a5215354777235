"""Published results, measured again: one command a system (docs/p2res.md)."""
