"""Executes plans: shards a model in place, trains it, and proves it equal to the oracle."""
