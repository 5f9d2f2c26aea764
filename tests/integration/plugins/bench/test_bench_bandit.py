"""The benchmarks of learning on the bandit: rows, pictures, and two algorithms that learn."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rollart_bench import algorithms, bandit, failures
from rollart_core.config.load import validate
from rollart_core.errors import UserError
from rollart_core.plugins.manager import plugins

pytest.importorskip("matplotlib", reason="matplotlib is in rollart[bench]")


def learned(after, trained=(0.2, 0.5, 0.9)):
    ends = [SimpleNamespace(success=SimpleNamespace(mean=mean)) for mean in (0.25, after)]
    report = SimpleNamespace(
        before=ends[0],
        after=ends[1],
        run_dir="runs/x",
        ok=True,
        stop_reason="",
        failures={},
        batches=len(trained),
        train_wall_s=3.0,
    )
    return bandit.Learned(report, tuple(trained), 1.0)


def test_what_is_trained_is_led_back_to_what_was_chosen():
    # Of 100 pulls 30 are the best arm's, and 18 of them survive; of the others 63 do.
    assert failures.policy_curve("dropped", [18 / (18 + 63)]) == pytest.approx([0.3])
    # All 100 are trained, 18 with success.
    assert failures.policy_curve("counted as 0", [0.18]) == pytest.approx([0.3])
    assert failures.policy_curve("no failures", [0.3]) == [0.3]


def test_noise_is_students():
    # s1 = s2 = 1, n = 3, 4 degrees of freedom: 2.776 * sqrt(2 / 3) = 2.2666
    assert bandit.noise([1, 2, 3], [4, 5, 6]) == pytest.approx(2.2666, abs=1e-3)
    # s1 = sqrt(3.5), s2 = 0, n = 6, 10 degrees of freedom: 2.228 * sqrt(3.5 / 6) = 1.7017
    assert bandit.noise([1, 2, 3, 4, 5, 6], [1] * 6) == pytest.approx(1.7017, abs=1e-3)


def test_only_being_within_noise_of_no_failures_meets_the_mark():
    ways = {name: [learned(a) for a in (0.9, 0.92, 0.94)] for name in failures.WAYS}
    ways["counted as 0"] = [learned(0.1, (0.2, 0.2, 0.1))] * 3
    marked = [r for r in failures.rows(ways) if r["mark"]]
    assert [r["case"].partition(" (")[0] for r in marked] == [
        "excluded and retried: best arm on held-out tasks after training",
        "excluded and retried: best arm on average over training",
    ]
    assert [r["meets_mark"] for r in marked] == [True, True]
    ways["excluded and retried"] = [learned(a) for a in (0.7, 0.72, 0.74)]
    assert failures.rows(ways)[0]["meets_mark"] is False
    zero = next(r for r in failures.rows(ways) if "counted as 0: best arm on held" in r["case"])
    assert (zero["ours"], zero["peer"]) == (pytest.approx(0.1), pytest.approx(0.92))
    json.dumps(failures.rows(ways))


def test_one_seed_says_nothing_of_noise():
    ways = {name: [learned(0.9)] for name in failures.WAYS}
    assert failures.rows(ways)[0]["meets_mark"] is None


def test_an_algorithm_that_breaks_is_told_of_and_meets_no_mark(tmp_path):
    outcomes = [
        algorithms.AlgorithmOutcome("grpo", learned(0.95)),
        algorithms.AlgorithmOutcome("grpo", learned(0.8)),
        algorithms.AlgorithmOutcome("grpo", None, "it broke"),
    ]
    rows = algorithms.rows(outcomes)
    assert [r["meets_mark"] for r in rows] == [True, False, False]
    assert "it broke" in rows[2]["case"]
    algorithms.draw(outcomes, tmp_path / "new" / "all.png")
    assert (tmp_path / "new" / "all.png").read_bytes().startswith(b"\x89PNG")


def test_every_registered_algorithm_has_a_config_that_is_one(tmp_path):
    begin = {"model": {"path": str(tmp_path), "device": "cpu"}}
    asked = algorithms._Pending(tmp_path, begin, str(tmp_path), 2, 60.0, 0)
    for name in plugins().registered("algorithms"):
        config, problems = validate(algorithms.config_of(name, asked))
        assert config is not None, problems
    short = replace(asked, beginner=bandit.short_run())
    config, problems = validate(algorithms.config_of("grpo", short))
    assert config is not None, problems
    with pytest.raises(UserError, match="algorithm"):
        algorithms._names(["grpo", "no-such"])


@pytest.fixture(scope="module")
def beginner(tmp_path_factory):
    model = bandit.beginner(tmp_path_factory.mktemp("taught"), algorithms.ENV)
    return {"model": {"path": model, "device": "cpu"}}


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_it_learns_from_a_quarter_to_nine_tenths(name, beginner, tmp_path):
    asked = algorithms._Pending(tmp_path, beginner, "", 20, 300.0, 0)
    run = bandit.learn(algorithms.config_of(name, asked))
    assert 0.15 < run.before < 0.4
    assert run.after > algorithms.MARK
