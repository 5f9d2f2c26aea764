"""The files that a run writes and reads: journal, trajectories, checkpoints."""
