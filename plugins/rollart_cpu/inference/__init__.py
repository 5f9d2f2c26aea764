"""A decoder for CPUs."""
