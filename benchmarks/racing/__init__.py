"""The race with TorchRec: who races, the floor of a shape, goals, the report."""
