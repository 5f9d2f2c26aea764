"""What must hold between the keys of a run config."""
