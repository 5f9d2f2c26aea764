"""How property tests draw their examples.

They try the same examples in every run, so that a failure comes with a change of the code. With
``ROLLART_TEST_EXAMPLES=random`` each run draws its own. No example depends on how long it takes.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "rollart",
    derandomize=os.environ.get("ROLLART_TEST_EXAMPLES") != "random",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("rollart")
