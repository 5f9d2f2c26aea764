"""Ray, whose processes wait for one another as long as a busy machine makes them.

As a program it is Ray's own: `python patient_ray.py start --head`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent.parent))

from rollart_ray import local as ray_local
from support.pace import scaled

NODE_UP_S: Final = scaled(240.0)
"""For a node to come up; Ray itself gives it half a minute, and then says that the GCS is
overloaded."""


@contextmanager
def patient_ray() -> Iterator[None]:
    """Have the patience in this process and in those that it starts.

    They collect no metrics: nobody reads them.
    """
    patience = {
        "RAY_worker_register_timeout_seconds": f"{scaled(300):.0f}",
        "RAY_agent_register_timeout_ms": f"{scaled(300_000):.0f}",
        "RAY_gcs_rpc_server_connect_timeout_s": f"{scaled(60):.0f}",
        "RAY_gcs_server_request_timeout_seconds": f"{scaled(120):.0f}",
        "RAY_enable_metrics_collection": "0",
    }
    with ray_local.variables(patience), patient_starts():
        yield


@contextmanager
def patient_starts() -> Iterator[None]:
    """Have nodes that this process starts waited for."""
    from ray._private import services

    with mock.patch.object(services, "get_node", _waiting(services.get_node)):
        yield


def _waiting(get_node: Callable[..., Any]) -> Callable[..., Any]:
    def found(*args: Any) -> Any:
        end = time.monotonic() + NODE_UP_S
        while True:
            try:
                return get_node(*args)
            except RuntimeError as e:  # it is not known yet
                if time.monotonic() > end:
                    raise TimeoutError(f"a node is not up within {NODE_UP_S:g} s: {e}") from e
            time.sleep(0.05)

    return found


if __name__ == "__main__":
    from ray.scripts.scripts import main

    with patient_starts():
        sys.exit(main())
