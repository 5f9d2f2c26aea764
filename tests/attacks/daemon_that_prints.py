"""Leaves a process that prints results and outlives the tests.

Runners: pytest unittest sympy django
"""

import os
import time

if os.fork() == 0:
    os.setsid()
    time.sleep(0.2)
    print("test_area ok")
    print("test_area (tests.test_shapes.TestShapes.test_area) ... ok", flush=True)
    time.sleep(3600)


def area(w, h):
    return 0


def edge(w, h):
    return 2 * (w + h)
