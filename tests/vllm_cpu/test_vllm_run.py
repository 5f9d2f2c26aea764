"""A run on WebShop through two real vLLM servers: weights under way, and the death of one."""

from __future__ import annotations

import pytest
from cpu_vllm import SCRIPT, SERVER_ARGS, command
from support.server_run import train_while_a_server_dies

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]


def test_training_on_webshop_is_exact_over_weight_updates_and_the_death_of_one_of_two_servers(
    tmp_path, monkeypatch
):
    engine = {"id": "vllm", "command": list(command()), "server_args": SERVER_ARGS}
    train_while_a_server_dies(engine, SCRIPT, tmp_path, monkeypatch, runtime={"num_engines": 2})
