"""Every config of examples/gpu is whole: it passes --dry-run, and fits the cluster it is for."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from rollart_core.cli import main
from rollart_core.config.load import load_config
from rollart_planner.cluster import load_cluster

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/guides/gpus.md"
ONE_GPU = ROOT / "examples" / "gpu" / "one_gpu.yaml"
CONFIGS = sorted(set((ROOT / "examples" / "gpu").glob("*.yaml")) - {ONE_GPU})
OF = re.compile(r"rollart plan (\S+) --cluster (\S+)")


@pytest.fixture
def rollart(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["rollart", *arguments])
        with pytest.raises(SystemExit) as e:
            main()
        said = capsys.readouterr()
        code = e.value.code or 0
        assert isinstance(code, int)
        return code, said.out, said.err

    return call


def cluster_of(config: Path) -> str:
    """Return the cluster file that the config's own comment names for it."""
    found = OF.search(config.read_text(encoding="utf-8"))
    assert found is not None
    assert (ROOT / found[1]) == config
    return found[2]


def test_there_are_two_models_two_environments_and_three_sizes() -> None:
    names = {p.stem for p in CONFIGS}
    models, envs, sizes = ("qwen3_8b", "qwen3_30b_a3b"), ("webshop", "swe"), (8, 16, 64)
    assert names == {f"{m}_{e}_{n}" for m in models for e in envs for n in sizes}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda p: p.stem)
def test_a_dry_run_needs_no_gpu_no_weights_and_no_sglang(rollart, config: Path) -> None:
    code, out, err = rollart("run", str(config), "--dry-run")
    assert (code, err) == (0, "")
    assert "rollart/SGLang-v1" in out
    assert "Files, programs and sandboxes on its nodes are checked at the start." in out


@pytest.mark.parametrize("config", CONFIGS, ids=lambda p: p.stem)
def test_it_fits_its_cluster_by_the_plan(rollart, config: Path) -> None:
    code, out, err = rollart("plan", str(config), "--cluster", cluster_of(config), "--json")
    assert (code, err) == (0, "")
    said = json.loads(out)
    parts = {verdict["part"]: verdict for verdict in said["memory"]}
    run = load_config(config)
    in_memory = {"/dev/shm"} if run.weights.id == "shared-memory" else set()
    assert set(parts) == {"trainer rank", "machine", "engine", *in_memory}
    assert all(v["fits"] and v["needed_bytes"] <= v["have_bytes"] for v in parts.values())
    assert not any(v["says"] for v in parts.values())  # nor is there too little room for rows
    runtime = run.runtime
    assert parts["trainer rank"]["count"] == runtime.num_trainer_ranks
    assert sum(said["num_engines"].values()) == runtime.num_engines
    # 8.19 or 30.5 billion parameters in 2 bytes, over the devices of an engine
    weights = 16.38e9 if "8b" in config.stem.split("_") else 61.06e9
    each = weights / run.engine.options["tp_size"]
    assert parts["engine"]["needed"]["weights"] == pytest.approx(each, rel=1e-3)
    # what docs/guides/gpus.md shows
    memory = [
        f"{parts[name]['needed_bytes'] / 1e9:.0f} of {parts[name]['have_bytes'] / 1e9:.0f}"
        for name in ("trainer rank", "engine")
    ]
    rate = f"{said['expected']['trajectories_per_s']:.2g}"
    assert _rows_of(PAGE.read_text(encoding="utf-8"))[config.stem][5:8] == [*memory, rate]


def _rows_of(page: str) -> dict[str, list[str]]:
    """Return the cells of each config's row."""
    lines = [line for line in page.splitlines() if line.startswith("| `qwen3_")]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    return {cells[1].strip("`"): cells for cells in rows}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda p: p.stem)
def test_its_pools_are_those_of_its_cluster(config: Path) -> None:
    cluster = {pool.name: pool for pool in load_cluster(ROOT / cluster_of(config)).pools}
    run = load_config(config)
    gpus = 0
    for pool in run.runtime.pools:
        if pool.device == "cpu":
            continue
        assert (pool.device, pool.count) == (cluster[pool.name].device, cluster[pool.name].count)
        assert set(pool.roles) == set(cluster[pool.name].roles)
        gpus += pool.count
    assert gpus == int(config.stem.rpartition("_")[2])
    taken = run.runtime.num_engines * run.engine.options["tp_size"] + run.runtime.num_trainer_ranks
    assert taken <= gpus


MODELS = {
    "Qwen3-0.6B": (),
    "Qwen3-1.7B": (),
    "Qwen3-4B": ("lora={rank: 32, alpha: 64}",),
    "Qwen3-8B": ("lora={rank: 32, alpha: 64}",),
}


@pytest.mark.parametrize("model", MODELS)
def test_one_gpu_has_room_for_both_phases_of_each_model_that_its_comments_name(
    rollart, model: str
) -> None:
    changes = [f"model.path=Qwen/{model}", *MODELS[model]]
    text = ONE_GPU.read_text(encoding="utf-8")
    if named := re.search(rf"^# +Qwen/{re.escape(model)} +(.*)$", text, flags=re.MULTILINE):
        keys = [key.split(": ") for key in named[1].split(", ")]
        changes += [f"model.shape.{name}={value}" for name, value in keys]
    cluster = cluster_of(ONE_GPU)
    code, out, err = rollart("plan", str(ONE_GPU), *changes, "--cluster", cluster, "--json")
    assert (code, err) == (0, "")
    parts = {verdict["part"]: verdict for verdict in json.loads(out)["memory"]}
    assert parts["trainer rank"]["needed"]["sleeping engine"] == 3e9
    assert parts["engine"]["needed"]["offloaded trainer"] == 1e9
    assert parts["machine"]["needed"]["offloaded trainer"] > 0
    gb = [parts[name]["needed_bytes"] / 1e9 for name in ("trainer rank", "engine", "machine")]
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    (row,) = [line for line in lines if line.startswith(f"| {model} ")]
    cells = [cell.strip() for cell in row.split("|")[3:6]]
    assert cells == [f"{gb[0]:.0f} of 72", f"{gb[1]:.0f} of 72", f"{gb[2]:.0f}"]
    if not MODELS[model]:
        return
    code, out, err = rollart("plan", str(ONE_GPU), *changes, "lora=null", "--cluster", cluster)
    assert code == 1  # all its parameters do not fit
    assert "NO" in out or "131.1 GB" in err


def test_a_dry_run_of_one_gpu_checks_the_program_and_the_files(rollart, tmp_path: Path) -> None:
    code, _, err = rollart("run", str(ONE_GPU), "--dry-run")
    assert code == 1
    missing = {line.partition("yaml: ")[2].partition(":")[0] for line in err.splitlines()}
    assert missing <= {"engine.command", "env.data_dir"}
    here = (f"engine.command=[{sys.executable}]", "env.data_dir=null", "env.observation_mode=terse")
    code, out, err = rollart("run", str(ONE_GPU), *here, f"runs_dir={tmp_path}", "--dry-run")
    assert (code, err) == (0, "")
    assert "rollart/SGLang-v1" in out


def test_what_does_not_fit_is_said_with_what_to_change(rollart) -> None:
    config, cluster = "examples/gpu/qwen3_8b_webshop_8.yaml", "examples/clusters/h100_8.yaml"
    tight = ("runtime.num_trainer_ranks=2", "trainer.activation_checkpointing=false")
    code, out, err = rollart("plan", config, *tight, "--cluster", cluster, "--json")
    assert (code, err) == (1, "")
    verdict = next(v for v in json.loads(out)["memory"] if v["part"] == "trainer rank")
    assert not verdict["fits"]
    assert verdict["says"].startswith("the trainer's 2 rank(s) need")
    code, out, err = rollart("plan", config, *tight, "--cluster", cluster)
    assert code == 1
    assert "NO" in out
    assert "a new version of the weights takes the trainer 0.37 s (gather 0.026 s, send" in out
    code, out, err = rollart("plan", config, "engine.tp_size=3", "--cluster", cluster)
    assert (code, out) == (1, "")
    assert "cannot split 32 heads evenly" in err
    code, _, err = rollart("plan", config, "engine.tp_size=16", "--cluster", cluster)
    assert code == 1
    assert "an engine needs 16 devices of one machine, but gpus has 8" in err


def test_too_little_shared_memory_is_said_with_what_to_do(rollart, tmp_path: Path) -> None:
    text = (ROOT / "examples/clusters/h100_8.yaml").read_text(encoding="utf-8")
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(text.replace("host_memory_gb: 2000", "shm_gb: 30"))
    code, out, _ = rollart(
        "plan", "examples/gpu/qwen3_8b_webshop_8.yaml", "--cluster", str(cluster)
    )
    assert code == 1
    assert (
        "2 versions of the weights need 32.8 GB of /dev/shm of each machine of gpus, which" in out
    )
