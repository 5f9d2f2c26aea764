"""Boxes for environments: one loop for all of a process, and where to get a box from."""
