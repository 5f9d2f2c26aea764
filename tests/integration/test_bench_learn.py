"""The benchmark of learning: rows, curves and the picture."""

import json

import pytest

from rollart_core.bench import learn
from rollart_core.view.pictures import smoothed

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
    flat = list(learn._flat(nested))
    assert flat == [("trainer.lr", 0.1), ("trainer.compile", "off"), ("seed", 3), ("env", {})]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_short_form_runs_and_draws(tmp_path):
    picture = tmp_path / "new" / "curves.png"
    options = {"short": True, "runs_dir": str(tmp_path), "picture": str(picture), "seed": 5}
    result = learn.run(options)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert result["picture"] == str(picture)
    (run,) = result["runs"]
    assert run["batches"] >= 1
    assert (run["seed"], run["ok"]) == (5, True)
    assert result["rows"][0]["ours"] == run["success_after"]["mean"]
    json.dumps(result)
