"""`rollart bench controller`: turns of real processes, its marks, and a checkout as the peer."""

from __future__ import annotations

import pytest

from rollart_bench import controller, sides
from rollart_bench.controller import LENGTHS, run
from rollart_core.errors import RollartError, UserError

SHORTEST, MIDDLE, LONGEST = map(str, LENGTHS)


def measured(longest_us: float, shortest_us: float = 100.0) -> dict[str, dict[str, float]]:
    costs = {SHORTEST: shortest_us, MIDDLE: shortest_us, LONGEST: longest_us}
    return {length: {"us": us, "turns_per_s": 1e6 / us, "ms": 1.0} for length, us in costs.items()}


def test_turns_are_measured_at_the_planned_length(monkeypatch):
    monkeypatch.setattr(controller, "LENGTHS", (200, 400))
    costs = controller.measure({"turns": 2})
    assert list(costs) == ["200", "400"]
    assert all(cost["us"] > 0 and cost["turns_per_s"] > 0 for cost in costs.values())


def test_an_episode_of_another_length_is_an_error(monkeypatch):
    monkeypatch.setattr(controller, "LENGTHS", (4_000,))
    monkeypatch.setattr(controller, "_WORD", "there hello" * 200)  # the worker has its own
    with pytest.raises(RollartError, match="tokens instead of 4000"):
        controller.measure({"turns": 2})


@pytest.mark.parametrize(("longest_us", "is_met"), [(149.0, True), (151.0, False)])
def test_a_turn_of_the_longest_context_has_a_mark(longest_us, is_met, monkeypatch):
    monkeypatch.setattr(controller, "in_fresh_process", lambda *_, **__: measured(longest_us))
    rows = {row["case"]: row for row in run({"rounds": "2"})["rows"]}
    assert rows["a turn at 32,000 tokens"]["meets_mark"] is is_met
    assert rows["a turn at 32,000 tokens"]["ratio"]["median"] == longest_us / 100
    assert rows["a turn at 1,000 tokens"]["mark"] is None


def test_the_other_commit_plays_in_turn_and_its_cost_is_compared(monkeypatch, repo_root):
    asked = []

    def fake(function, argument, *, checkout=""):
        asked.append(checkout)
        return measured(100.0, shortest_us=110.0 if checkout else 100.0)

    monkeypatch.setattr(controller, "in_fresh_process", fake)
    rows = {row["case"]: row for row in run({"rounds": "2", "peer": str(repo_root)})["rows"]}
    assert asked == ["", str(repo_root), str(repo_root), ""]
    row = rows["a turn at 1,000 tokens, and at the other commit"]
    assert (row["ratio"]["median"], row["meets_mark"]) == (1.1, True)


def test_a_folder_that_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not a checkout of RollArt"):
        run({"peer": str(tmp_path)})


def test_a_side_imports_the_packages_of_a_checkout_and_these_benchmarks(tmp_path, repo_root):
    (tmp_path / "plugins").mkdir()
    (tmp_path / "rollart_core").symlink_to(repo_root / "rollart_core")
    for package in (repo_root / "plugins").glob("rollart_*"):
        if package.name != "rollart_bench":
            (tmp_path / "plugins" / package.name).symlink_to(package)
    other = tmp_path / "plugins/rollart_bench"
    other.mkdir()
    (other / "__init__.py").write_text("raise ImportError('the benchmarks of the checkout')")
    probe = tmp_path / "plugins/rollart_probe"
    probe.mkdir()
    (probe / "__init__.py").write_text(
        "import inspect, pathlib, rollart_core, rollart_bench\n"
        "def origins(asked):\n"
        "    files = [pathlib.Path(inspect.getfile(p)) for p in (rollart_core, rollart_bench)]\n"
        "    return {'core': str(files[0].parent), 'bench': str(files[1].resolve().parent)}\n"
    )
    found = sides.in_fresh_process("rollart_probe:origins", {}, checkout=str(tmp_path))
    assert found == {
        "core": str(tmp_path / "rollart_core"),
        "bench": str(repo_root / "plugins/rollart_bench"),
    }
