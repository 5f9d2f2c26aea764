from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rollart_core.config.load import dump_yaml, load_config, read_yaml
from rollart_core.config.model import ModelPath, NewModel
from rollart_core.config.run import AsyncRun, RunConfig, SyncRun
from rollart_core.errors import ConfigError

BASE = "env: webshop\nmodel: {kind: new}\nstop: {batches: 2}\n"
Load = Callable[..., RunConfig]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load BASE with more YAML and overrides; the file is called x.yaml."""

    def inner(more: str = "", *overrides: str, base: str = BASE) -> RunConfig:
        path = tmp_path / "x.yaml"
        path.write_text(base + more)
        return load_config(path, overrides)

    return inner


def refused(load: Load, more: str = "", *overrides: str, base: str = BASE) -> list[str]:
    """Return the lines of the ConfigError, without the folder of the file."""
    with pytest.raises(ConfigError) as caught:
        load(more, *overrides, base=base)
    return [
        line.rpartition("/")[2] if "x.yaml" in line else line
        for line in str(caught.value).splitlines()
    ]


def test_the_smallest_config_and_its_modes(load: Load) -> None:
    config = load()
    assert isinstance(config, AsyncRun)
    assert isinstance(config.model, NewModel)
    assert config.env.id == "webshop"
    sync = load("mode: sync\n")
    assert isinstance(sync, SyncRun)
    assert sync.staleness_bound == 0


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (
            "rollout: {group_sise: 4}",
            "x.yaml: rollout.group_sise: unknown key. Did you mean 'group_size'?",
        ),
        ("max_stalenes: 1", "x.yaml: max_stalenes: unknown key. Did you mean 'max_staleness'?"),
        ("warm_start: {ler: 1}", "x.yaml: warm_start.ler: unknown key. Did you mean 'lr'?"),
        ("runtime: inlin", "x.yaml: runtime: there is no runtime 'inlin': use inline or ray"),
        ("mode: synk", "x.yaml: mode: must be sync or async, got 'synk'"),
        ("lora: 5", "x.yaml: lora: must be a section of keys, got 5"),
        ("evaluation:", "x.yaml: evaluation: must be a section of keys, got None"),
        ("trackers: wandb", "x.yaml: trackers: must be a list, such as [wandb]"),
        ("trackers: 5", "x.yaml: trackers: must be a list, got 5"),
        (
            "split: test",
            "x.yaml: split: unknown key. Did you mean 'rollout.split' or 'evaluation.split'?",
        ),
        (
            "trainer: {clip: {kind: quantile, z_threshold: 2}}",
            "x.yaml: trainer.clip.z_threshold: has no effect with trainer.clip.kind: quantile; "
            "it belongs to trainer.clip.kind: zscore",
        ),
        (
            "trainer: {clip: mean}",
            "x.yaml: trainer.clip: there is no kind 'mean': use one of norm, quantile, zscore",
        ),
        (
            "trainer: {schedule: {kind: step}}",
            "x.yaml: trainer.schedule.kind: must be 'constant', 'linear', 'cosine' or 'wsd', "
            "got 'step'",
        ),
        (
            "trainer: {grad_clip: -1}",
            "x.yaml: trainer.grad_clip: must be above 0 and at most 1,000,000,000 "
            "(the default is 1), got -1",
        ),
    ],
)
def test_a_wrong_key_is_named_with_its_path(load: Load, more: str, line: str) -> None:
    assert refused(load, more) == [line]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("mode: sync\nmax_staleness: 2", "max_staleness: has no effect with mode: sync"),
        (
            "mode: sync\nrollout: {kv_on_swap: keep}",
            "rollout.kv_on_swap: has no effect with mode: sync",
        ),
        (
            "mode: sync\nrollout: {in_flight: restart}",
            "rollout.in_flight: has no effect with mode: sync",
        ),
        (
            "max_staleness: 0\nrollout: {in_flight: continue}",
            "rollout.in_flight: has no effect with max_staleness: 0",
        ),
    ],
)
def test_a_key_of_another_mode_has_no_effect(load: Load, more: str, said: str) -> None:
    (line,) = refused(load, more)
    assert said in line


def test_a_key_of_another_kind_of_model_has_no_effect(load: Load) -> None:
    base = "env: webshop\nstop: {batches: 2}\n"
    (line,) = refused(load, "model: {kind: new, path: gpt2}", base=base)
    assert "model.path: has no effect with model.kind: new" in line
    (line,) = refused(load, "model: {path: gpt2, num_layers: 3}", base=base)
    assert "model.num_layers: has no effect with a model that exists" in line


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("trainer: {collective_timeout_s: 9}", "collective_timeout_s: has no effect with one"),
        (
            "trainer: {kernels: native}\nruntime: {num_trainer_ranks: 2}",
            "trainer.kernels: has no effect with several trainer ranks",
        ),
        (
            "trainer: {kernels: native, activation_checkpointing: true}",
            "trainer.kernels: has no effect with several trainer ranks or activation_checkpointing",
        ),
    ],
)
def test_a_key_of_another_number_of_ranks_has_no_effect(load: Load, more: str, said: str) -> None:
    (line,) = refused(load, more)
    assert said in line


@pytest.mark.parametrize("name", ["../../x", "a/b", "a\\b", "/abs", ".", "..", ""])
def test_a_name_keeps_the_run_inside_of_its_folder(load: Load, name: str) -> None:
    with pytest.raises(ConfigError, match=r"x\.yaml: name: .* cannot be part of a folder's name"):
        load(f"name: {json.dumps(name)}")


@pytest.mark.parametrize("key", ["top_p", "top_k", "repetition_penalty"])
def test_truncated_and_penalised_sampling_is_refused_with_a_reason(load: Load, key: str) -> None:
    (line,) = refused(load, f"rollout: {{{key}: 1}}")
    assert f"rollout.{key}: is refused: " in line
    assert "of the policy" in line


def test_every_problem_is_told_at_once_and_missing_keys_say_what_is_wanted(load: Load) -> None:
    lines = refused(load, "env: webshop\nfoo: 1\ntrainer: {lr: 0}\n", base="")
    assert len(lines) == 4
    assert any("stop: is missing (when training ends" in line for line in lines)
    assert any("model: is missing" in line for line in lines)


def test_a_stop_without_an_end(load: Load) -> None:
    (line,) = refused(load, "stop: {}", base="env: webshop\nmodel: {kind: new}\n")
    assert line == "x.yaml: stop: stop needs batches or wall_s; without them the run never ends"


def test_overrides_make_sections_and_reach_into_short_forms(load: Load) -> None:
    config = load(
        "runtime: inline\ntrackers: [tensorboard]\n",
        "trainer.lr=3e-4",
        "env.data_dir=../somewhere",
        "runtime.env_processes=3",
        "trackers.0.colour=red",
        "stop.wall_s=7",
        "stop.batches=null",
        "model=openai-community/gpt2",
    )
    assert config.trainer.lr == 3e-4
    assert (config.env.id, config.env.options) == ("webshop", {"data_dir": "../somewhere"})
    assert config.runtime.env_processes == 3
    assert config.trackers[0].options == {"colour": "red"}
    assert (config.stop.batches, config.stop.wall_s) == (None, 7.0)
    assert config.model == ModelPath(path="openai-community/gpt2")


def test_options_alone_are_those_of_the_default_plugin(load: Load) -> None:
    config = load("algorithm: {clip_low: 0.1}\n", "engine.kv_tokens=100")
    assert (config.algorithm.id, config.algorithm.options) == ("grpo", {"clip_low": 0.1})
    assert (config.engine.id, config.engine.options) == ("embedded", {"kv_tokens": 100})


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.lr", "must be key=value"),
        ("=3", "must be key=value"),
        ("seed.x=3", "override 'seed.x=3'"),
        ("trackers.7.a=1", "override 'trackers.7.a=1'"),
        ("env={a", "not YAML"),
    ],
)
def test_a_wrong_override(load: Load, override: str, said: str) -> None:
    (line,) = refused(load, "seed: 1\ntrackers: [tensorboard]\n", override)
    assert said in line


def test_a_wrong_value_on_the_command_line_is_told_apart_from_the_file(load: Load) -> None:
    lines = refused(load, "trainer: {eps: x}", "trainer.lr=fast")
    unparsed = "must be a valid number, unable to parse string as a number, got"
    assert lines == [
        f"command line: trainer.lr: {unparsed} 'fast'",
        f"x.yaml: trainer.eps: {unparsed} 'x'",
    ]


def test_on_and_off_are_words_and_exponents_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: off\nb: 3e-4\nc: true\nd: 0x10\ne: 1_000\nf: -.inf\ng: 2026-01-01\nh: no\n")
    values = read_yaml(path)
    assert values == {
        **{"a": "off", "b": 3e-4, "c": True, "d": 16, "e": 1000},
        **{"f": float("-inf"), "g": "2026-01-01", "h": "no"},
    }
    path.write_text(dump_yaml(values))
    assert read_yaml(path) == values


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\na: 2\n", "a.yaml:2:1: not YAML: key 'a' is given twice"),
        ("a: [1\n", "a.yaml:2:1: not YAML:"),
        ("- 1\n", "must be a mapping"),
        ("", "must be a mapping"),
        ("a: !!python/object:os.system {}\n", "not YAML"),
    ],
)
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"a\.yaml") as caught:
        read_yaml(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("deadlines", "key"),
    [
        ("step_s: 700", "deadlines.step_s"),
        ("generate_s: 601", "deadlines.generate_s"),
        ("episode_s: 1800", "deadlines.episode_s"),
        ("reward_s: 2000", "deadlines.reward_s"),
        ("sandbox_ttl_s: 1000", "deadlines.ticket_s"),
    ],
)
def test_deadlines_nest(load: Load, deadlines: str, key: str) -> None:
    (line,) = refused(load, f"deadlines: {{{deadlines}}}")
    assert key in line
    assert "must be shorter than deadlines." in line


def test_a_group_cannot_keep_more_members_than_it_has(load: Load) -> None:
    (line,) = refused(load, "rollout: {group_size: 2, min_group_size: 3}")
    assert "rollout.min_group_size" in line


def test_redundant_members_and_determinism_exclude_each_other(load: Load) -> None:
    assert load("rollout: {redundant: 2}").rollout.redundant == 2
    (line,) = refused(load, "deterministic: true\nrollout: {redundant: 2}")
    assert "rollout.redundant: with 2 redundant members" in line


def test_a_model_path_that_is_no_model(load: Load, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path, said in (
        (str(folder), "has no config.json"),
        (__file__, "is a file"),
        ("./nowhere/at/all", "there is no folder"),
        ("nope", "there is no folder nope, and a hub id is OWNER/NAME"),
    ):
        (line,) = refused(load, "", f"model={path}")
        assert said in line
    (folder / "config.json").write_text("{}")
    assert load("", f"model={folder}").model == ModelPath(path=str(folder))
    assert load("", "model=Qwen/Qwen3-0.6B").model == ModelPath(path="Qwen/Qwen3-0.6B")


def test_a_name_without_an_owner_is_a_hub_id_where_the_cache_has_it(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert len(refused(load, "", "model=gpt2")) == 1
    for file, text in {"refs/main": "0" * 40, f"snapshots/{'0' * 40}/config.json": "{}"}.items():
        path = tmp_path / "models--gpt2" / file
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert load("", "model=gpt2").model == ModelPath(path="gpt2")


def test_a_row_has_capacity_for_more_than_the_answer(load: Load) -> None:
    (line,) = refused(load, "rollout: {max_context_tokens: 4, max_new_tokens: 4}")
    assert "rollout.max_context_tokens: 4 tokens must hold prompt and answer" in line
    assert load("rollout: {max_context_tokens: 5, max_new_tokens: 4}").rollout.max_new_tokens == 4
    remote = "model: {kind: remote}\nrollout: {max_new_tokens: 4096}"  # its server counts
    base = "\n".join(line for line in BASE.splitlines() if not line.startswith("model")) + "\n"
    assert load(remote, base=base).rollout.max_new_tokens == 4096


def test_a_workload_is_of_one_environment(load: Load) -> None:
    asked = "rollout: {workload: {prefill_tokens: 400, decode_tokens: 90, turns: 7}}\n"
    assert load(asked).rollout.workload is not None
    two = BASE.replace("env: webshop", "env: [webshop, frozenlake]")
    line = "x.yaml: rollout.workload: has no effect with several environments, which declare their"
    assert refused(load, asked, base=two)[0].startswith(line)
    assert "turns" in refused(load, asked.replace("turns: 7", "turns: 0"))[0]


@pytest.mark.parametrize(
    ("more", "overrides", "expected"),
    [
        ("", [], None),
        ("guard: off", [], None),
        ("guard: on", [], 3),
        ("guard: {max_rollbacks: 1}", [], 1),
        ("guard: on", ["guard.max_rollbacks=5"], 5),
        ("guard: off", ["guard.max_rollbacks=5"], 5),
        ("", ["guard=on", "guard.max_rollbacks=5"], 5),
        ("guard: {max_rollbacks: 1}", ["guard=off"], None),
        ("guard: on", ["guard.limits.kl=0.5"], 3),
    ],
)
def test_the_guard_is_a_switch_or_a_section(
    load: Load, more: str, overrides: list[str], expected: int | None
) -> None:
    guard = load(more, *overrides).guard
    assert (guard.max_rollbacks if guard else None) == expected


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ("guard: onn", "guard: must be on, off or a section of keys such as {max_rollbacks: 5}, "),
        ("guard: true", "guard: must be on, off or a section of keys such as"),
        (
            "guard: {lr_factor: 2}",
            "guard.lr_factor: must be above 0 and at most 1 (the default is",
        ),
        ("guard: {watch: score}", "guard.watch: must be 'success' or 'reward', got 'score'"),
        ("guard: {limits: {kll: 1}}", "guard.limits.kll: unknown key. Did you mean 'kl'?"),
    ],
)
def test_a_wrong_word_for_the_guard_is_refused(load: Load, more: str, line: str) -> None:
    (found,) = refused(load, more)
    assert found.startswith(f"x.yaml: {line}")
