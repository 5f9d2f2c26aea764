"""The card of an evaluation: what was evaluated, by whom it was played, what came of it.

Takes: what ``report.json`` holds. Gives: Markdown. Never: computes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rollart_core.evals.table import markdown, of_report, shown_score, shown_success

Json = Mapping[str, Any]
_HOW = """\
Means are over tasks, with 95% intervals clustered by the environment's clusters of tasks, or by
task if it has none: Wilson's with the effective number of attempts for success, normal ones for
scores. pass@k is the unbiased estimator of Chen et al. (2021, arXiv:2107.03374). Failed episodes
are in no mean; they are counted."""


def card(report: Json) -> str:
    """Return the card as Markdown."""
    facts = report["card"]
    parts = [
        f"# {report['name']}",
        _table(("", ""), _facts(report)),
        "## Success",
        markdown(of_report(report)),
        "## All figures",
        _table(
            ("environment", "player", "success", "score", "pass@k", "episodes", "failed"),
            (_figures(cell) for cell in report["cells"]),
        ),
        _HOW,
        "## Environments",
        _table(
            ("environment", "id", "package", "split", "tasks", "attempts", "options"),
            (_env(env) for env in facts["envs"]),
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _facts(report: Json) -> Iterable[tuple[str, str]]:
    facts = report["card"]
    yield "model", f"`{facts['model']}`" if facts["model"] else "none: baselines alone"
    if facts.get("served_as"):
        yield "served as", f"`{facts['served_as']}`"
    if facts.get("tokenizer"):
        yield "its tokenizer", f"`{facts['tokenizer']}`"
    if facts["model_hash"]:
        yield "SHA-256 of its files", f"`{facts['model_hash']}`"
    yield "SHA-256 of the config", f"`{facts['config_hash']}`"
    yield "seed", str(facts["seed"])
    if facts["temperature"] is not None:
        yield "temperature", f"{facts['temperature']:g}"
        yield "new tokens a turn, at most", str(facts["max_new_tokens"])
    yield "RollArt", facts["rollart"]
    yield "made", facts["made"]
    yield "attempts that failed", _kinds(report["failures"]) or "none"


def _figures(cell: Json) -> tuple[str, ...]:
    passes = (f"@{k} {100 * e['mean']:.1f}%" for k, e in cell["pass_at"].items() if e["n"])
    kinds = f" ({_kinds(cell['failures'])})" if cell["failures"] else ""
    has_success = bool(cell["success"] and cell["success"]["n"])
    return (
        f"`{cell['env']}`",
        cell["column"],
        shown_success(cell) if has_success else "-",
        shown_score(cell["score"]),
        " ".join(passes) or "-",
        str(cell["episodes"]),
        f"{cell['failed']}{kinds}",
    )


def _env(env: Json) -> tuple[str, ...]:
    options = json.dumps(env["options"], sort_keys=True)
    return (
        f"`{env['name']}`",
        f"`{env['id']}`",
        f"{env['package']} {env['version']}",
        env["split"],
        f"{env['tasks']} in {env['clusters']} clusters" if "clusters" in env else str(env["tasks"]),
        str(env["attempts"]),
        f"`{options}`" if env["options"] else "defaults",
    )


def _kinds(failures: Json) -> str:
    return ", ".join(f"{kind}: {n}" for kind, n in failures.items())


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *(list(row) for row in rows)]
    return "\n".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines
    )
