"""The benchmarks. Each module with a `run(options)` compares ours with a peer in one run.

Its ``TAKES`` names its options, including ``short``. With ``CONFIG = True``, every other option is
a key of a run config.
"""
