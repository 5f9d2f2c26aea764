"""The checkpoints of a run: written, found, loaded, and renamed if they cannot be loaded.

    checkpoints/v000020/   weights and optimizer, written by the trainer; then run_state.json, with
                           the size and a checksum (first and last MiB) of every other file
    checkpoints/marks.json the checkpoints that are always kept: the best one, and the last good one

Takes: a run directory, and a way to call the trainer. Gives: the newest state that can be loaded.
Never: loads an incomplete checkpoint (one without run_state.json), or deletes one that it could not
load. Such a checkpoint is renamed, because a run may continue only from the newest of a lineage.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import zlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from rollart_core.errors import ConfigError, WorkerDied, first_line
from rollart_core.store.run_dir import STATE_FILE, RunState, checkpoint_folder, write_json

EDGE_BYTES = 2**20
"""The checksum of a file covers this many bytes at each end."""

MARKS_FILE = "marks.json"
Mark = Literal["best", "good"]

CallTrainer = Callable[..., Awaitable[Any]]
"""Calls a method of the trainer by name."""


class Checkpoints:
    """The checkpoints of one run; see the module."""

    def __init__(
        self, run_dir: Path, keep: int, notify: Callable[[str], None], *, guard_window: int = 0
    ) -> None:
        """Open the checkpoints of a run directory.

        Args:
            run_dir: The run directory.
            keep: The number of newest checkpoints to keep, besides the marked ones.
            notify: Called with a message for each checkpoint that is renamed.
            guard_window: Number of batches after which a checkpoint counts as good without a
                validation; 0 if there is no guard.
        """
        self._run_dir = run_dir
        self._folder = run_dir / "checkpoints"
        self._keep = keep
        self._guard_window = guard_window
        self._notify = notify

    def whole(self) -> list[Path]:
        """Return the complete checkpoints, newest first."""
        return sorted((p.parent for p in self._folder.glob(f"v*/{STATE_FILE}")), reverse=True)

    def expect_one(self) -> None:
        """Check quickly that there is a checkpoint with unchanged files.

        Raises:
            ConfigError: If there is none.
        """
        bad: dict[Path, str] = {}
        for folder in self.whole():
            try:
                RunState.read(folder)
                _check_seal(folder)
            except (OSError, ValueError) as e:
                bad[folder] = first_line(str(e))
            else:
                return
        raise ConfigError(self._none_left(bad))

    async def finish(self, state: RunState) -> None:
        """Complete the checkpoint in the trainer's folder, and remove old checkpoints."""
        folder = checkpoint_folder(self._run_dir, state.policy_version)
        state.write(folder, await asyncio.to_thread(_seal, folder))
        for old in self._surplus():
            await self._remove(old)

    def mark(self, mark: Mark, policy_version: int, facts: Mapping[str, object]) -> None:
        """Mark the checkpoint of a version as the best or last good one, instead of another.

        Args:
            mark: The mark.
            policy_version: A version with a complete checkpoint.
            facts: The reason, for readers of the file.
        """
        facts = {**facts, "policy_version": policy_version}
        write_json(self._folder / MARKS_FILE, {**self._read_marks(), mark: facts})

    def marks(self) -> dict[str, int]:
        """Return the marked versions; their checkpoints are never removed."""
        return {mark: int(facts["policy_version"]) for mark, facts in self._read_marks().items()}

    def has(self, policy_version: int) -> bool:
        """Return whether there is a complete checkpoint of a version."""
        return (checkpoint_folder(self._run_dir, policy_version) / STATE_FILE).is_file()

    async def load(self, policy_version: int, trainer: CallTrainer) -> RunState:
        """Load the checkpoint of one version into the trainer.

        Raises:
            ConfigError: If it cannot be loaded, with the reason.
            TrainerLost: If the trainer died while loading it.
        """
        folder = checkpoint_folder(self._run_dir, policy_version)
        try:
            return await self._load(folder, trainer)
        except WorkerDied:
            raise
        except Exception as e:
            why = first_line(str(e)) or type(e).__name__
            raise ConfigError(f"the checkpoint {folder.name} cannot be loaded ({why})") from e

    def last_good(self, since: int) -> int:
        """Return the version of the checkpoint that the guard rolls back to.

        This is the last checkpoint that passed its validation. Without validations, it is the
        newest one that is at least ``guard_window`` batches older than ``since``, else the oldest.

        Args:
            since: The first suspicious version.
        """
        versions = [_version(folder) for folder in self.whole()]
        good = self.marks().get("good")
        if good is not None and good in versions:
            return good
        return next((v for v in versions if v <= since - self._guard_window), versions[-1])

    async def discard(self, start: int, stop: int) -> None:
        """Remove the checkpoints between two versions, so that no run continues from them.

        Args:
            start: The version of the last good checkpoint.
            stop: The first version after the rolled back ones.
        """
        for folder in self.whole():
            if start < _version(folder) < stop:
                await self._remove(folder)

    async def _remove(self, folder: Path) -> None:
        (folder / STATE_FILE).unlink()  # first: a partly removed folder is not a checkpoint
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _surplus(self) -> list[Path]:
        """Return the checkpoints that are too old to be kept and not marked.

        With a guard, the newest one older than its window is kept, and the one that will be next.
        """
        every = self.whole()
        kept = set(every[: self._keep])
        kept.update(checkpoint_folder(self._run_dir, v) for v in self.marks().values())
        if self._guard_window and every:
            limit = _version(every[0]) - self._guard_window
            kept.update([p for p in every if _version(p) <= limit][:1])
            kept.update([p for p in every if _version(p) > limit][-1:])
        return [folder for folder in every if folder not in kept]

    async def load_newest(self, trainer: CallTrainer) -> RunState:
        """Load the newest loadable checkpoint into the trainer; rename newer, unloadable ones.

        Raises:
            ConfigError: If there is none.
            TrainerLost: If the trainer died while loading it.
        """
        bad: dict[Path, str] = {}
        for folder in self.whole():
            try:
                state = await self._load(folder, trainer)
            except WorkerDied:
                raise
            except Exception as e:
                bad[folder] = first_line(str(e)) or type(e).__name__
                continue
            for newer, why in bad.items():
                self._set_aside(newer, why, state.policy_version)
            return state
        raise ConfigError(self._none_left(bad))

    async def _load(self, folder: Path, trainer: CallTrainer) -> RunState:
        state = RunState.read(folder)
        await asyncio.to_thread(_check_seal, folder)
        await trainer("load", str(folder))
        return state

    def _read_marks(self) -> dict[str, dict[str, Any]]:
        try:
            content = json.loads((self._folder / MARKS_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return dict(content)

    def _set_aside(self, folder: Path, why: str, version: int) -> None:
        for i in range(1, 100):
            target = self._folder / f"bad-{folder.name}{f'-{i}' if i > 1 else ''}"
            if not target.exists():
                break
        folder.rename(target)
        self._notify(
            f"The checkpoint {folder.name} cannot be loaded ({why}): it is renamed to {target}, "
            f"and the run continues from version {version}."
        )

    def _none_left(self, bad: dict[Path, str]) -> str:
        if not bad:
            return (
                f"{self._run_dir} contains no checkpoint to continue from: the run ended before "
                "its training began; start a new run"
            )
        faults = "; ".join(f"{folder.name}: {why}" for folder, why in bad.items())
        return (
            f"no checkpoint in {self._folder} can be loaded ({faults}); restore one from a copy, "
            "or start a new run"
        )


def _version(folder: Path) -> int:
    return int(folder.name.removeprefix("v"))


def _seal(folder: Path) -> dict[str, list[int]]:
    """Return the size and the checksum of every file, by name."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != STATE_FILE)
    return {str(p.relative_to(folder)): [p.stat().st_size, _edges(p)] for p in files}


def _edges(path: Path) -> int:
    """Return the CRC-32 of a file's first and last MiB; reading all of it may take minutes."""
    with path.open("rb") as file:
        checksum = zlib.crc32(file.read(EDGE_BYTES))
        if path.stat().st_size > 2 * EDGE_BYTES:
            file.seek(-EDGE_BYTES, 2)
        return zlib.crc32(file.read(), checksum)


def _check_seal(folder: Path) -> None:
    """Compare the files with the recorded sizes and checksums.

    Raises:
        ValueError: If a file is missing or changed.
    """
    content = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    for name, (size, checksum) in content.get("files", {}).items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{name} is missing")
        if path.stat().st_size != size:
            raise ValueError(f"{name} has {path.stat().st_size} bytes instead of {size}")
        if _edges(path) != checksum:
            raise ValueError(f"the content of {name} has changed since it was written")
