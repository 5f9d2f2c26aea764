"""Runtimes start the workers of a run. They use this machine, a cluster, or a virtual clock."""
