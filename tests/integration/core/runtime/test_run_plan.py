"""A run's plan, followed by the router, measured and made again; and the benchmark of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from support.chat_templates import TEMPLATES, write_tokenizer

from rollart_bench import affinity
from rollart_core.config.load import load_config, validate
from rollart_core.config.resolve import resolve_run
from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import HardwareMapper, ModelShape, Placement, Pool
from rollart_core.errors import ConfigError
from rollart_core.inference.router import Router
from rollart_core.runtime.launch import launch
from rollart_core.runtime.placement import RunPlan, demand_of, workloads_of
from rollart_core.runtime.prepare import prepare
from rollart_core.store.journal_reader import JournalReader
from rollart_core.types import Task, Ticket, Trajectory, Turn
from rollart_testing.modelled_engine import ModelledEngine

SHAPE = ModelShape(8_000_000_000, 32, 32, 8, 128)
LAKE, SOKOBAN = "toy/FrozenLake-v1", "toy/Sokoban-v1"
POOLS = [
    Pool("h100", "H100", 2, roles=("engines",)),
    Pool("h20", "H20", 2, roles=("engines",)),
    Pool("train", "B200", 8, roles=("trainer",)),
    Pool("cpus", "cpu", 64),
]


def resolved(**changes):
    config, problems = validate(
        {
            "model": {"kind": "new"},
            "env": [{"id": LAKE}, {"id": SOKOBAN}],
            "runtime": {"num_trainer_ranks": 8},
            "stop": {"batches": 1},
            **changes,
        }
    )
    assert not problems
    return resolve_run(config)


def trajectory(env_id: str, num_prompt: int, num_new: int) -> Trajectory:
    turn = Turn("", "", num_prompt, num_new, "stop", 0.0, 0.1, 0.01)
    return Trajectory(Ticket("g.0", Task(env_id, "train", 0, 0), "g", 0), "finished", turns=(turn,))


def test_the_demand_has_the_batch_and_the_weights():
    asked = {"groups_per_batch": 4, "group_size": 8, "max_turns": 6, "max_context_tokens": 1000}
    workload = {"prefill_tokens": 80, "decode_tokens": 20, "turns": 2}
    given = {"env": LAKE, "rollout": {**asked, "workload": workload}}
    plain = demand_of(resolved(**given))
    assert (plain.batch_trajectories, plain.max_staleness) == (32, 1)
    assert (plain.num_references, plain.shm_copies) == (0, 2)  # the shared memory channel keeps two
    assert plain.longest == 3.0  # six turns instead of two
    short = {**asked, "max_context_tokens": 300, "workload": workload}
    assert demand_of(resolved(**{**given, "rollout": short})).longest == 1.5
    one = {**asked, "max_turns": 1, "max_new_tokens": 50, "workload": {**workload, "turns": 1}}
    assert demand_of(resolved(**{**given, "rollout": one})).longest == 2.5
    other = resolved(
        **given,
        mode="sync",
        weights={"id": "disk", "keep": 3},
        algorithm={"id": "grpo", "kl_coef": 0.1},
    )
    found = demand_of(other)
    assert (found.max_staleness, found.num_references, found.shm_copies) == (0, 1, 0)
    kept = resolved(**given, weights={"id": "shared-memory", "keep": 3})
    assert (demand_of(kept).shm_copies, demand_of(kept).host_copies) == (3, 0)
    sent = demand_of(resolved(**given, weights={"id": "collective", "keep": 3}))
    assert (sent.shm_copies, sent.host_copies) == (0, 3)


class Started:
    """A run plan with a router of two engines on each of two pools."""

    def __init__(self, run, pools=POOLS):
        self.events: list[tuple[str, dict]] = []
        self.plan = RunPlan(run, lambda kind, payload: self.events.append((kind, dict(payload))))
        self.placement = self.plan.begin(pools)
        computing = [pool for pool in pools if "engines" in pool.roles]
        self.router = Router([ModelledEngine(SHAPE, pool) for pool in computing])
        self.followed = []
        self.router.place = self.followed.append  # type: ignore[method-assign]

    async def play(self, trajectories):
        given = iter(trajectories)

        async def run_episode(ticket, start_version):
            return next(given)

        watched = self.plan.watched(run_episode, self.router)
        for each in trajectories:
            assert await watched(each.ticket, 0) is each
        if self.plan._planning is not None:
            await self.plan._planning
        await self.plan.close()


@pytest.fixture(autouse=True)
def _large_model(monkeypatch):
    """The model of the config is tiny; this one makes hardware matter."""
    monkeypatch.setattr("rollart_core.runtime.placement.shape_of", lambda model: SHAPE)
    monkeypatch.setattr("rollart_core.runtime.inline.shm_fault", lambda *machine: None)


def read_and_write(n: int) -> list[Trajectory]:
    each = [(trajectory(LAKE, 6000, 8), trajectory(SOKOBAN, 60, 1500)) for _ in range(n)]
    return [t for pair in each for t in pair]


def test_a_run_is_planned_again_with_what_was_measured():
    started = Started(resolved())
    asyncio.run(started.play(read_and_write(100)))
    (first, second) = (payload for kind, payload in started.events if kind == "plan")
    assert first["why"] == []
    assert any(LAKE in why and "prefill_tokens 6000" in why for why in second["why"])
    assert second["workloads"][SOKOBAN]["decode_tokens"] == pytest.approx(1500)
    (placement,) = started.followed
    assert placement.engines[LAKE] == {"h100": pytest.approx(1.0)}
    assert placement.engines[SOKOBAN].get("h20", 0) > 0.5
    assert started.plan.placement == placement
    assert placement.envs == started.placement.envs


def test_workloads_as_declared_are_planned_once():
    started = Started(resolved())
    declared = workloads_of(resolved())[LAKE]
    same = trajectory(LAKE, round(declared.prefill_tokens), round(declared.decode_tokens))
    turns = same.turns * round(declared.turns)
    grown = tuple(
        Turn("", "", t.num_prompt_tokens * (i + 1) + t.num_new_tokens * i, t.num_new_tokens,
             "stop", 0.0, 0.1, declared.env_s)
        for i, t in enumerate(turns)
    )  # fmt: skip
    asyncio.run(started.play([Trajectory(same.ticket, "finished", turns=grown)] * 200))
    assert [kind for kind, _ in started.events] == ["plan"]
    assert not started.followed


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConfigError("mapper x: no"), "mapper x: no"),
        (KeyError("h20"), "the mapper raised KeyError: 'h20'"),
    ],
)
def test_a_plan_that_cannot_be_changes_nothing(monkeypatch, error: Exception, said: str):
    started = Started(resolved())

    def refuse(*_):
        raise error

    monkeypatch.setattr("rollart_core.runtime.placement.place", refuse)
    asyncio.run(started.play(read_and_write(80)))
    assert [kind for kind, _ in started.events][:2] == ["plan", "plan_kept"]
    assert started.events[1][1]["error"] == said
    assert not started.followed
    assert started.plan.placement == started.placement


def test_on_one_pool_nothing_is_planned_again():
    started = Started(resolved(), [Pool("local", "cpu", 4, roles=("engines", "envs", "trainer"))])
    asyncio.run(started.play(read_and_write(100)))
    assert [kind for kind, _ in started.events] == ["plan"]


class AsDeclaredHere(HardwareMapper):
    """Episodes of 9 turns go to ``engine``, all others to ``other``."""

    def place(self, workloads, pools):
        (env, workload), *_ = workloads.items()
        pool = "engine" if workload.turns == 9 else "other"
        return Placement({env: "local"}, {env: {pool: 1.0}}, "local")


class PlansAtOnce(RunPlan):
    """An episode ends once the plan is made that it gave reason for, however long that takes."""

    def watched(self, run_episode, router):
        watch = super().watched(run_episode, router)

        async def then_plan(ticket, start_version):
            trajectory = await watch(ticket, start_version)
            if self._planning is not None:
                await asyncio.shield(self._planning)
            return trajectory

        return then_plan


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_follows_what_it_measures_of_its_own_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It plans again after 64 episodes, all of which it needs for its batches."""
    monkeypatch.setattr("rollart_core.runtime.launch.RunPlan", PlansAtOnce)
    path = tmp_path / "run.yaml"
    path.write_text(
        f"""
runs_dir: {tmp_path}/runs
model: {{kind: new, num_layers: 1, width: 32, ffn_width: 48, vocab_size: 320}}
env: {{id: "rollart_testing:FakeEnv", turns: 2}}
engines: [{{name: other, engine: embedded, count: 1}}]
mapper: {__name__}:AsDeclaredHere
algorithm: {{id: grpo, zero_advantage: keep}}
trackers: []
evaluation: {{tasks: 2, greedy: false}}
rollout:
  workload: {{prefill_tokens: 20, decode_tokens: 4, turns: 9}}
  groups_per_batch: 2
  group_size: 8
  max_new_tokens: 4
  max_context_tokens: 320
stop: {{batches: 4}}
"""
    )
    report = launch(resolve_run(load_config(path)))
    assert report.ok
    with JournalReader(Path(report.run_dir)) as journal:
        first, second = (json.loads(event.payload) for event in journal.events(kind="plan"))
    assert first["why"] == []
    (why,) = second["why"]
    assert "turns 2 instead of 9" in why
    (ran,) = (one["ran"]["engines"] for one in report.as_dict()["envs"].values())
    assert ran["engine"]["conversations"]
    assert ran["other"]["conversations"]


# The benchmark


def test_the_benchmark_compares_what_should_differ():
    cluster = affinity.pools(1.0)
    sides = affinity.placements(cluster, 3)
    expected = {name: affinity.expected_rate(side, cluster) for name, side in sides.items()}
    best = expected.pop("affinity")
    assert {name.split(",")[0].split()[0] for name in expected} == {"colocate", "random", "even"}
    assert all(best > rate for rate in expected.values())
    assert best > affinity.MARK * max(r for n, r in expected.items() if n.startswith("colocate"))


def test_the_plan_counts_the_rows_that_a_chat_template_makes(tmp_path):
    write_tokenizer(tmp_path, "{}", TEMPLATES["thinks"][0], "<|im_end|>")
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {tmp_path}\nenv: frozenlake\nstop: {{batches: 1}}\n")
    (one,) = workloads_of(resolve_run(load_config(path))).values()
    user = resolve_run(load_config(path, ["rollout.observation_role=user"]))
    (several,) = workloads_of(user).values()
    assert (one.rows, several.rows) == (1, several.turns)
    kept = load_config(path, ["rollout.observation_role=user", "rollout.keep_thinking=true"])
    assert workloads_of(resolve_run(kept)) == {"toy/FrozenLake-v1": one}


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "model.chat_template_kwargs.enable_thinkin=false",
            "model.chat_template_kwargs: the chat template of this model has no variable "
            "'enable_thinkin'; its variables are enable_thinking, preserve_thinking. Did you mean "
            "'enable_thinking'?",
        ),
        (
            "rollout.max_thinking_tokens=64",
            "rollout.max_thinking_tokens: 64 must be below rollout.max_new_tokens (64), which "
            "holds both",
        ),
    ],
)
def test_a_dry_run_refuses_what_the_template_cannot_do(tmp_path, override, line):
    write_tokenizer(tmp_path, "{}", TEMPLATES["thinks"][0], "<|im_end|>")
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {{path: {tmp_path}}}\nenv: frozenlake\nstop: {{batches: 1}}\n")
    prepare(path, ["rollout.observation_role=tool"])
    with pytest.raises(ConfigError) as caught:
        prepare(path, [override])
    assert str(caught.value).partition(": ")[2] == line


def test_a_run_may_say_what_its_episodes_ask_for(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {kind: new}\nenv: frozenlake\nstop: {batches: 1}\n"
        "rollout: {workload: {prefill_tokens: 400, decode_tokens: 90, turns: 7, env_s: 2}}\n"
    )
    run = resolve_run(load_config(path))
    assert workloads_of(run) == {"toy/FrozenLake-v1": Workload(400, 90, 7, 2.0)}
    again = tmp_path / "again.yaml"
    again.write_text(run.to_yaml())  # as a run's own config.yaml holds it
    assert workloads_of(resolve_run(load_config(again))) == workloads_of(run)
