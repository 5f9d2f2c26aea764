"""The benchmarks: each module with a `run(options)` is one, ours beside a peer's in one run.

Its ``TAKES`` names its options, ``short`` among them. With ``CONFIG = True`` every other option is
a key of a run config.
"""
