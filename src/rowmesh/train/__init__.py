"""Training: the loop and what it measures."""
