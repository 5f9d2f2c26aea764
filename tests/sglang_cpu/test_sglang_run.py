"""A run on WebShop through a real SGLang server: weights under way, and the death of the server."""

from __future__ import annotations

import pytest
import yaml
from cpu_servers import command
from support.server_run import CONFIG, train_while_a_server_dies

from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.errors import ConfigError

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(2400)]

ENGINE = {
    "id": "sglang",
    "server_args": {"max_total_tokens": 32768},
}


def test_training_on_webshop_is_exact_over_weight_updates_and_the_death_of_the_server(
    tmp_path, monkeypatch
):
    engine = {**ENGINE, "command": list(command())}
    train_while_a_server_dies(engine, "serve_cpu.py", tmp_path, monkeypatch)


def test_a_run_with_a_seed_for_every_token_is_refused(tmp_path):
    path = tmp_path / "run.yaml"
    config = {**CONFIG, "deterministic": True, "runs_dir": str(tmp_path / "runs")}
    config["engine"] = ENGINE
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match="has no seed"):
        resolve_run(load_config(path))
