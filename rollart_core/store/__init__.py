"""What a run writes and reads again: journal, trajectories, checkpoints."""
