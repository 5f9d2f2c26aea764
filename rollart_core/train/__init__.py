"""Updating the weights: batches, the trainer, checkpoints, and the warm start before RL."""
