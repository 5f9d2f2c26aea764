#!/usr/bin/env python3
"""Measure in a run which of our functions and files are between an episode and its calls.

    scripts/call_paths.py           a table
    scripts/call_paths.py --json    one JSON object, with every path

A small run on the bandit (inline, one process per worker, the reward on ``pool``) uses the classes
of :mod:`call_paths_plugins` instead of the built-in ones. At the first call of each kind, the
called process records the coroutines and the stack that wait for the class, and waits until the
run's own process has recorded the same. Counted are the frames of this repository below the
episode's (for the loss: below the controller's) and above the called class.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

HERE: Final = Path(__file__).resolve()
ROOT: Final = HERE.parents[1]
VARIABLE: Final = "ROLLART_CALL_PATHS"
"""The folder for recorded stacks."""
EPISODE: Final = "rollart_core/rollout/episode.py"
CONTROLLER: Final = "rollart_core/scheduling/controller.py"
FROM: Final = {
    "env.reset": (EPISODE, "_play", "rollart_core/rollout/"),
    "engine.generate": (EPISODE, "_turn", "rollart_core/inference/"),
    "env.step": (EPISODE, "_turn", "rollart_core/rollout/"),
    "reward.score": (EPISODE, "run_episode", "rollart_core/rewards/"),
    "algorithm.loss": (CONTROLLER, "_train", "rollart_core/runtime/"),
}
"""Call -> the function that makes it, and the path prefix of the first frame below that."""
OWN_TASKS: Final = ("rollart_core/rewards/", "plugins/rollart_plugins/serverless/")
"""Where tasks start that continue an episode's call: the queue of a reward, its backend."""
OWN_CALL: Final = ("rollart_core/runtime/process.py", "call")
"""The same: a call that the worker finishes even if its caller was cancelled."""
BEGUN: Final = "begun"
"""The name of the file that marks the start of training: only later calls are recorded."""
LIMIT_S: Final = 60.0
"""Seconds that a call waits for the run's own process."""

Frame = tuple[str, str]
"""File relative to the repository, and function."""


def main() -> None:
    """Print the paths."""
    paths = call_paths()
    if "--json" in sys.argv[1:]:
        print(json.dumps(paths, indent=1))
        return
    for call, path in paths.items():
        print(f"{call}: {len(path)} frames")
        for file, function in path:
            print(f"    {file}: {function}")
    files = files_of(paths)
    print(f"files: {len(files)}", *files, sep="\n    ")


def files_of(paths: dict[str, list[Frame]]) -> list[str]:
    """Return the files on the path of an episode, from its reset to its weight update."""
    return sorted({EPISODE, CONTROLLER, *(file for path in paths.values() for file, _ in path)})


def call_paths() -> dict[str, list[Frame]]:
    """Return each call of a run -> the frames on its path."""
    from rollart_core.config.load import validate
    from rollart_core.config.resolve import resolve_run
    from rollart_core.runtime.launch import launch

    sys.path.insert(0, str(HERE.parent))  # workers inherit it
    with tempfile.TemporaryDirectory() as folder:
        os.environ[VARIABLE] = folder
        closed = threading.Event()
        watcher = threading.Thread(target=_watch, args=(Path(folder), closed), daemon=True)
        watcher.start()
        try:
            config, problems = validate(_config(folder))
            if config is None or problems:
                raise SystemExit("\n".join(p.within() for p in problems))
            report = launch(resolve_run(config), observer=_Begins(Path(folder)))
        finally:
            closed.set()
            watcher.join()
        if not report.ok:
            raise SystemExit(f"the run failed: {report.stop_reason}")
        return {
            call: [
                (file, function)
                for end in ("waiting", "called")
                for file, function in _read(Path(folder) / f"{call}.{end}")
            ]
            for call in FROM
        }


def _config(folder: str) -> dict[str, object]:
    plugins = "call_paths_plugins"
    return {
        "name": "paths",
        "runs_dir": folder,
        "mode": "sync",
        "runtime": {"kind": "inline", "env_processes": 1},
        "model": {
            "kind": "new",
            "num_layers": 1,
            "width": 32,
            "num_heads": 1,
            "ffn_width": 32,
            "vocab_size": 320,
        },
        "env": {"id": f"{plugins}:Env"},
        "reward": {"id": f"{plugins}:EpisodeReward"},
        "scoring": {"backend": {"id": "pool", "num_workers": 1}},
        "algorithm": {"id": f"{plugins}:Loss"},
        "weights": {"id": f"{plugins}:Channel"},
        "trackers": [],
        "rollout": {
            "groups_per_batch": 1,
            "group_size": 2,
            "max_new_tokens": 3,
            "max_context_tokens": 96,
        },
        "evaluation": {"split": "test", "tasks": 1, "greedy": False},
        "stop": {"batches": 4},
    }


class _Begins:
    """Records calls from the start of training; see ``RunObserver``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def phase(self, name: str, detail: str = "") -> None:
        if name == "train":
            (self._folder / BEGUN).touch()

    def progress(self, fraction: float | None, line: object) -> None:
        """Ignore it."""

    def message(self, text: str) -> None:
        """Ignore it."""


def note(call: str) -> None:
    """Record the path of the first call of a kind, and wait for the run's own process."""
    folder = Path(os.environ[VARIABLE])
    called, waiting = folder / f"{call}.called", folder / f"{call}.waiting"
    with _NOTING:
        if called.exists() or not (folder / BEGUN).exists():
            return
        stack = [_ours(frame) for frame in _stack(sys._getframe(2))]
        on_loop = stack if threading.current_thread() is threading.main_thread() else None
        answering = [] if on_loop else [task for task in _tasks() if task[0][1] == "_answer"]
        answering = [task for task in answering if task[-1][1] != "receive"][-1:]
        _write(called, [*(frame for task in answering for frame in task), *filter(None, stack)])
        until_s = time.monotonic() + LIMIT_S
        while called.exists() and not waiting.exists() and time.monotonic() < until_s:
            time.sleep(0.01)


_NOTING = threading.Lock()


def _watch(folder: Path, closed: threading.Event) -> None:
    """Record the waiting frames of this process when a call is recorded in another one."""
    while not closed.wait(0.01):
        for called in folder.glob("*.called"):
            waiting = called.with_suffix(".waiting")
            if not waiting.exists():
                path = _waiting_for(called.stem, list(_tasks()))
                if path:
                    _write(waiting, path)
                else:  # a call of the set-up: the next one can be an episode's
                    called.unlink()


def _waiting_for(call: str, tasks: Sequence[list[Frame]]) -> list[Frame]:
    """Return our frames that wait for a call, starting at the episode's or the controller's."""
    file, function, below = FROM[call]
    found: list[Frame] = []
    for task in tasks:
        asked = task.index((file, function)) + 1 if (file, function) in task else len(task)
        if asked < len(task) and task[asked][0].startswith(below):
            found = task[asked:]
    if found and call == "reward.score":
        own = [t for t in tasks if t[0][0].startswith(OWN_TASKS) or t[0] == OWN_CALL]
        found = list(dict.fromkeys([*found, *(frame for task in own for frame in task)]))
    return found


def _tasks() -> Iterator[list[Frame]]:
    """Yield our frames of each waiting task of this process's event loop, outermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_name != "run_forever":
        frame = frame.f_back
    for task in asyncio.all_tasks(frame.f_locals["self"]) if frame is not None else ():
        frames: list[Frame] = []
        coroutine: Any = task.get_coro()
        while (inner := getattr(coroutine, "cr_frame", None)) is not None:
            frames += filter(None, [_ours(inner)])
            coroutine = coroutine.cr_await
        if frames:
            yield frames


def _stack(frame: FrameType | None) -> list[FrameType]:
    """Return the frames down to those of the event loop or the thread, outermost first."""
    found = []
    while frame is not None and frame.f_code.co_filename not in (
        asyncio.events.__file__,
        threading.__file__,
    ):
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def _ours(frame: FrameType) -> Frame | None:
    path = Path(frame.f_code.co_filename)
    if ROOT not in path.parents or "site-packages" in path.parts or path.parent == HERE.parent:
        return None
    return str(path.relative_to(ROOT)), frame.f_code.co_name


def _write(path: Path, value: object) -> None:
    beside = path.with_suffix(path.suffix + ".part")
    beside.write_text(json.dumps(value), encoding="utf-8")
    beside.rename(path)


def _read(path: Path) -> Sequence[Any]:
    found: Sequence[Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    main()
