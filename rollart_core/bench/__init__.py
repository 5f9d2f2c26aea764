"""The benchmarks: each module with a `run(options)` is one, ours beside a peer's in one run.

Its ``TAKES`` names the options; None: it checks them itself.
"""
