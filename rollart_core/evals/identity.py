"""What was evaluated, so that somebody else can tell whether it was the same.

Takes: a resolved run, a model's folder. Gives: hashes and plain facts. Never: a secret, or a hash
of what is elsewhere (a server says which model it serves, and no more can be known).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from rollart_core.config.resolve import ResolvedEnv, ResolvedRun

_PLACES = ("runs_dir", "name", "runtime", "resolved_with")
"""Keys of a config that say where something runs or lies, and not what."""
_BLOCK = 1 << 20


def config_hash(config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a config without what only says where things are."""
    said = {key: value for key, value in config.items() if key not in _PLACES}
    text = json.dumps(said, sort_keys=True, default=str)
    return sha256(text.encode()).hexdigest()


def model_hash(path: str) -> str | None:
    """Return one SHA-256 over the names and contents of a model's files; None for no folder."""
    folder = Path(path)
    if not path or not folder.is_dir():
        return None
    total = sha256()
    for file in sorted(p for p in folder.iterdir() if p.is_file()):
        content = sha256()
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK):
                content.update(block)
        total.update(f"{file.name}\0{content.hexdigest()}\n".encode())
    return total.hexdigest()


def env_facts(run: ResolvedRun, env: ResolvedEnv) -> dict[str, Any]:
    """Return what an environment was, in which version, and on which tasks."""
    return {
        "name": env.name,
        "id": env.spec.id,
        "package": env.plugin.distribution,
        "version": env.plugin.version,
        "split": env.evaluation_split,
        "max_turns": env.max_turns,
        "seed": run.config.seed,
        "task_seeds": run.config.task_seeds,
        "options": json.loads(json.dumps(dict(env.plugin.options), default=str)),
    }
