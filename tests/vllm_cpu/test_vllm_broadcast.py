"""A broadcast from the trainer to the processes of real vLLM servers."""

from __future__ import annotations

import asyncio

import pytest
from cpu_vllm import SERVER_ARGS, command
from support.engine_servers import broadcast_with_a_death, make_model

from rollart_plugins.engines.vllm import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_servers_receive_one_broadcast_and_one_that_dies_in_it_costs_the_other_nothing(tmp_path):
    model = make_model(tmp_path / "m")
    launched = {
        "command": command(),
        "server_args": SERVER_ARGS,
        "weights_folder": str(tmp_path / "written"),
    }
    received, num_bytes = asyncio.run(
        broadcast_with_a_death(VllmEngine, launched, model, tmp_path / "channel")
    )
    assert received == num_bytes  # all came again, in files
    assert list((tmp_path / "written").iterdir()) == []
