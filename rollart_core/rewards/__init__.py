"""The scoring room: from a finished trajectory to its reward, beside the rollout and not in it."""
