"""The SGLang engine of a resolved run, without a server."""

from __future__ import annotations

import asyncio
import sys

import pytest

from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.errors import ConfigError, EngineDied
from rollart_core.runtime.factories import ModelArgs
from rollart_core.runtime.inline import InlineRuntime
from rollart_core.runtime.remote import START_LIMIT_S

SETTINGS = {"device": "cpu", "engine_index": 0, "max_context_tokens": 64}


def engine_of(tmp_path, options: dict[str, object], **settings: object):
    path = tmp_path / "run.yaml"
    path.write_text(
        "name: t\nmode: sync\nmodel: {kind: new}\nenv: {id: toy/FrozenLake-v1}\nalgorithm: grpo\n"
        f"engine: { ({'id': 'sglang'} | options)!r}\nstop: {{batches: 1}}\n"
    )
    engine = resolve_run(load_config(path)).engine
    return engine.build(model_path=str(tmp_path / "model"), **{**SETTINGS, **settings})


def test_the_options_of_a_resolved_run_build_the_engine(tmp_path):
    for options in ({}, {"url": ["http://127.0.0.1:9"]}, {"weights_folder": "w"}):
        assert engine_of(tmp_path, options).health == "up"
    with pytest.raises(ConfigError, match="this is engine 2"):
        engine_of(tmp_path, {"url": ["http://127.0.0.1:9"]}, engine_index=1)
    with pytest.raises(ConfigError, match="deterministic"):
        engine_of(tmp_path, {}, deterministic=True)


def test_a_server_that_ends_over_its_start_or_is_not_there_is_said_in_one_line(tmp_path):
    from rollart_core.config.model import NewModel
    from rollart_core.models.new import new_model

    new_model(str(tmp_path / "model"), NewModel(kind="new", num_layers=1, width=32), ["abc"] * 9, 0)

    async def start(error: type[Exception], match: str, **options: object) -> None:
        engine = engine_of(tmp_path, options)
        with pytest.raises(error, match=match):
            await engine.start()
        await engine.close()

    async def main() -> None:
        await start(EngineDied, r"during its start \(exit code 1\); see the log", command=["false"])
        says = [sys.executable, "-c", "print('ERROR x.py:3] OSError: no room'); exit(2)"]
        await start(EngineDied, r"\(exit code 2\): OSError: no room; see the log", command=says)
        await start(ConfigError, "'/no/such' cannot be started", command=["/no/such"])
        nobody = {"url": ["http://127.0.0.1:9"], "start_s": 0.1}
        await start(ConfigError, "no SGLang server answers at http://127.0.0.1:9", **nobody)
        keyed = {"url": ["http://127.0.0.1:9"], "api_key_variable": "NO_SUCH_VARIABLE"}
        await start(ConfigError, "NO_SUCH_VARIABLE is not set", **keyed)

    asyncio.run(main())


@pytest.mark.parametrize(("own", "seen"), [({}, "None"), ({"OMP_NUM_THREADS": "4"}, "4")])
def test_a_server_has_the_threads_of_its_machine_and_not_of_the_engine(
    tmp_path, monkeypatch, own, seen
):
    """The process of an engine has ``engine_threads``, and Ray sets 1 for its actors."""
    from rollart_core.config.model import NewModel
    from rollart_core.models.new import new_model

    new_model(str(tmp_path / "model"), NewModel(kind="new", num_layers=1, width=32), ["abc"] * 9, 0)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    program = tmp_path / "server.py"
    program.write_text(
        f"import os; open({str(tmp_path / 'seen')!r}, 'w').write("
        "f\"{os.environ.get('OMP_NUM_THREADS')} {os.environ['KEY']}\")"
    )
    monkeypatch.setenv("KEY", "inherited")
    engine = engine_of(tmp_path, {"command": [sys.executable, str(program)], "environment": own})

    async def main() -> None:
        with pytest.raises(EngineDied):
            await engine.start()
        await engine.close()

    asyncio.run(main())
    assert (tmp_path / "seen").read_text() == f"{seen} inherited"


def test_a_restart_may_take_as_long_as_the_engine_says(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {kind: new}\nenv: toy/FrozenLake-v1\nstop: {batches: 1}\n"
        "engine: {id: sglang, start_s: 5000}\nfailures: {load_weights_s: 900}\n"
    )
    run = resolve_run(load_config(path))
    engine = InlineRuntime(run, tmp_path)._engine(0, ModelArgs(""), None)
    assert engine._care.start_limit_s == START_LIMIT_S + 5000 + 900


def test_where_a_cluster_gives_gpus_a_server_counts_them_from_0(tmp_path):
    of_machine = engine_of(tmp_path, {"tp_size": 4, "first_gpu": 2}, engine_index=1)
    own = engine_of(tmp_path, {"tp_size": 4}, engine_index=1, has_own_devices=True)
    assert (of_machine._first_gpu, own._first_gpu) == (6, 0)


def test_a_first_gpu_is_refused_where_the_cluster_chooses(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "runtime: ray\nmodel: {kind: new}\nenv: toy/FrozenLake-v1\nstop: {batches: 1}\n"
        "engine: {id: sglang, first_gpu: 2, tp_size: 2}\n"
    )
    with pytest.raises(ConfigError, match=r"engine.first_gpu: has no effect with runtime: ray"):
        resolve_run(load_config(path))
    assert resolve_run(load_config(path, ["engine.first_gpu=0"])).engine_devices == 2
