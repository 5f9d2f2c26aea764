"""The benchmark of learning: rows, curves and the picture."""

import json

import pytest

from rollart_bench import learn
from rollart_bench.skip import BenchSkipped
from rollart_view.pictures import smoothed

pytest.importorskip("matplotlib", reason="matplotlib is in rollart[bench]")


def estimate(mean):
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "n": 100}


def curve(seed, after, **report):
    before = {f"{kind}_before": estimate(0.4) for kind in ("success", "greedy")}
    ends = {"success_after": estimate(after), "greedy_after": None, "train_wall_s": 3.0}
    kept = {"ok": True, "stop_reason": "", **before, **ends, **report}
    return learn.Curve(seed, kept, (1.0, 2.0, 3.0), (0.4, 0.5, 0.8))


def test_a_row_for_each_seed_and_their_mean():
    one, two, mean = learn._rows([curve(3, 0.9), curve(4, 0.7, ok=False, stop_reason="why")], 0.85)
    assert (one["ours"], one["peer"], one["meets_mark"]) == (0.9, 0.4, True)
    assert "seed 3, sampled 0.40 [0.30, 0.50] to 0.90 [0.80, 1.00], greedy 0.40" in one["case"]
    assert (two["meets_mark"], mean["meets_mark"]) == (False, False)
    assert "stopped: why" in two["case"]
    assert mean["ours"] == pytest.approx(0.8)


def test_a_run_without_its_end_meets_no_mark():
    (row,) = learn._rows([curve(0, 0.9, success_after=None)], 0.85)
    assert (row["ours"], row["meets_mark"]) == (None, False)


def test_smoothing_takes_neighbours_and_fewer_at_the_ends():
    assert smoothed([1, 2, 6, 7], over=3) == [1.5, 3, 5, 6.5]
    assert smoothed([], over=3) == []


def test_options_become_overrides():
    nested = {"trainer": {"lr": 0.1, "compile": "off"}, "seed": 3, "env": {}}
    flat = list(learn.flat(nested))
    assert flat == [("trainer.lr", 0.1), ("trainer.compile", "off"), ("seed", 3), ("env", {})]


def test_options_reach_the_run_and_its_curve_is_drawn(tmp_path, monkeypatch):
    asked = []

    def fake(path, overrides, seed):
        asked.append((path.name, overrides))
        return curve(seed, 0.9, train_wall_s=3.0)

    monkeypatch.setattr(learn, "_learn", fake)
    picture = tmp_path / "new" / "curves.png"
    options = {"short": True, "seeds": 2, "picture": str(picture), "seed": 5, "trainer": {"lr": 1}}
    result = learn.run(options)
    (path, first), (_, second) = asked
    assert path == "hello.yaml"
    assert {"stop.batches=3", "trainer.lr=1"} <= set(first)
    assert (first[-1], second[-1]) == ("seed=5", "seed=6")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert result["picture"] == str(picture)
    assert [run["seed"] for run in result["runs"]] == [5, 6]
    json.dumps(result)


def test_without_the_examples_it_is_skipped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(learn, "EXAMPLES", tmp_path / "nowhere")
    with pytest.raises(BenchSkipped, match=r"there is no hello\.yaml: .*give config=PATH"):
        learn.run({"short": True})
    (tmp_path / "mine.yaml").touch()
    assert learn.example("mine.yaml").name == "mine.yaml"
