"""Rollouts: episodes of a policy in an environment. Each one becomes a trajectory."""
