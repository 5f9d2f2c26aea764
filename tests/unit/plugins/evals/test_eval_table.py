"""Tables out of several reports."""

import json

import pytest

from rollart_core.errors import ConfigError
from rollart_core.store.estimates import mean_interval, wilson
from rollart_evals.cells import Cell, plain_estimate
from rollart_evals.table import Table, markdown, of_report, read_table

LAKE = {"name": "lake", "id": "toy/Lake-v1", "split": "test", "options": {"size": 4}, "seed": 0}
SHOP = {"name": "shop", "id": "web/Shop-v1", "split": "test", "options": {}, "seed": 0}


def cell(env, column, wins, n=10, **more):
    return Cell(env, column, n, 1, wilson(wins, n), mean_interval([1.0, 0.0]), **more).as_dict()


def report(*cells, envs=(LAKE, SHOP), left_out=()):
    card = {"envs": list(envs), "left_out": dict(left_out)}
    return {"kind": "evaluation", "card": card, "cells": list(cells)}


def written(folder, content, config=""):
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps(content))
    (folder / "config.yaml").write_text(config)
    return folder


def trained(folder, option=4, evaluation="split: test"):
    success = plain_estimate(wilson(90, 100))
    config = f"env: {{id: toy/Lake-v1, size: {option}}}\nseed: 0\nevaluation: {{{evaluation}}}\n"
    config += "rollout: {max_turns: 12}\n"
    return written(folder, {"success_after": success, "score_after": None}, config)


def test_columns_stand_in_order_and_what_was_not_measured_is_a_dash():
    cells = [cell("lake", "model", 5), cell("lake", "noop", 0), cell("shop", "oracle", 10)]
    dash = Cell("shop", "model", why="every episode failed: no").as_dict()
    text = markdown(of_report(report(*cells, dash, left_out={"box": "no wall"}.items())))
    lines = text.splitlines()
    assert lines[0] == "| environment | tasks | oracle | no-op | model |"
    assert lines[2] == "| `lake` | 10 | - | 0.0% [0.0, 27.8] | 50.0% [23.7, 76.3] |"
    assert lines[3].endswith("| 100.0% [72.2, 100.0] | - | - |")
    assert lines[4] == "| `box` | - | - | - | - |"
    assert lines[-1] == "- `shop`, model: every episode failed: no"


def test_what_a_run_trained_is_a_column_beside_baselines(tmp_path):
    table = of_report(report(cell("lake", "oracle", 10)))
    table.add(read_table(str(trained(tmp_path / "run"))), "run")
    assert table.columns == ["oracle", "trained"]
    assert "| `lake` | 10 / 100 | 100.0% [72.2, 100.0] | 90.0% [82.6, 94.5] |" in markdown(table)
    assert table.notes == []


def test_other_options_are_not_hidden(tmp_path):
    table = of_report(report(cell("lake", "oracle", 10)))
    table.add(read_table(f"big={trained(tmp_path / 'run', option=8)}"), "run")
    assert table.columns == ["oracle", "big"]
    assert table.notes == ["`lake`: run has other tasks: size 8 instead of 4"]


def test_environments_of_one_id_keep_a_row_each():
    other = {**LAKE, "name": "wide", "options": {"size": 8}}
    both = report(cell("lake", "noop", 0), cell("wide", "noop", 1), envs=(LAKE, other))
    table = Table()
    table.add(of_report(both), "a")
    assert list(table.cells) == [("lake", "noop"), ("wide", "noop")]
    alone = {**LAKE, "name": "mine"}
    table = of_report(report(cell("mine", "oracle", 9), envs=(alone,)))
    table.add(of_report(both), "a")
    assert list(table.envs) == ["mine", "lake", "wide"]


def test_attempts_at_one_task_are_no_tasks_of_a_run(tmp_path):
    run = trained(tmp_path / "run", evaluation="split: test, samples_per_task: 4")
    (found,) = read_table(str(run)).cells.values()
    assert (found["tasks"], found["attempts_per_task"], found["episodes"]) == (25, 4, 100)


def test_two_figures_never_share_a_place(tmp_path):
    one = written(tmp_path / "a", report(cell("lake", "model", 5)))
    two = written(tmp_path / "b", report(cell("lake", "model", 6), cell("shop", "model", 6)))
    table = Table()
    table.add(read_table(str(one)), "a")
    with pytest.raises(ConfigError, match="--with b: the table has a column 'model' for lake"):
        table.add(read_table(str(two)), "b")
    table = Table()
    table.add(read_table(str(one)), "a")
    table.add(read_table(f"later={two}"), "b")
    assert table.columns == ["model", "later"]


@pytest.mark.parametrize(
    ("content", "says"),
    [('{"ok": true}', "has no results on held-out tasks"), ("{", "cannot be read")],
)
def test_what_is_no_report_is_refused(tmp_path, content, says):
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(ConfigError, match=says):
        read_table(str(tmp_path))
