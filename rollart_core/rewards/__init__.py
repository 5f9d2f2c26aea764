"""The reward service: scores finished trajectories concurrently with the rollout."""
