"""Training: the trainer, its losses, optimizer, checkpoints, and the guard."""
