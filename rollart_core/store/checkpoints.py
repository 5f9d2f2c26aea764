"""The checkpoints of a run: written when whole, found again, and set aside when they are not.

    checkpoints/v000020/   weights and optimizer, by the trainer; then, last, run_state.json
                           with the size and the edges' checksum of every file beside it
    checkpoints/marks.json which of them are kept however many come after: the best one, and the
                           last good one

Takes: a run directory, and a way to call the trainer. Gives: the newest state that can be loaded.
Never: loads half a checkpoint (without its run_state.json it is none), or deletes one that it could
not load: that is set aside, since only the newest of a lineage may be gone on from.
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
"""How much of each end of a file its checksum is taken over."""

MARKS_FILE = "marks.json"
Mark = Literal["best", "good"]

CallTrainer = Callable[..., Awaitable[Any]]
"""Calls a method of the trainer by name."""


class Checkpoints:
    """The checkpoints of one run; see the module."""

    def __init__(
        self, run_dir: Path, keep: int, tell: Callable[[str], None], *, guard_window: int = 0
    ) -> None:
        """Look into a run directory.

        Args:
            run_dir: The run.
            keep: How many of the newest to keep, besides those that are marked.
            tell: Called with a message for each that is set aside.
            guard_window: Batches after which one counts as good without a validation; 0: there is
                no guard.
        """
        self._run_dir = run_dir
        self._folder = run_dir / "checkpoints"
        self._keep = keep
        self._guard_window = guard_window
        self._tell = tell

    def whole(self) -> list[Path]:
        """Return those that were written to the end, the newest first."""
        return sorted((p.parent for p in self._folder.glob(f"v*/{STATE_FILE}")), reverse=True)

    def expect_one(self) -> None:
        """See that there is one whose files are those that were written; this takes moments.

        Raises:
            ConfigError: When there is none.
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
        """Make the trainer's folder a checkpoint, and remove those that are too old."""
        folder = checkpoint_folder(self._run_dir, state.policy_version)
        state.write(folder, await asyncio.to_thread(_seal, folder))
        for old in self._surplus():
            await self._remove(old)

    def mark(self, mark: Mark, policy_version: int, facts: Mapping[str, object]) -> None:
        """Keep the checkpoint of a version as the best or last good one, in place of another.

        Args:
            mark: Which of the two.
            policy_version: Whose checkpoint is whole.
            facts: Why, for a person who reads the file.
        """
        facts = {**facts, "policy_version": policy_version}
        write_json(self._folder / MARKS_FILE, {**self._read_marks(), mark: facts})

    def marks(self) -> dict[str, int]:
        """Return the versions that are marked; their checkpoints are never removed."""
        return {mark: int(facts["policy_version"]) for mark, facts in self._read_marks().items()}

    def has(self, policy_version: int) -> bool:
        """Return whether there is a whole checkpoint of a version."""
        return (checkpoint_folder(self._run_dir, policy_version) / STATE_FILE).is_file()

    async def load(self, policy_version: int, trainer: CallTrainer) -> RunState:
        """Load the checkpoint of one version into the trainer.

        Raises:
            ConfigError: When it cannot be loaded, with the reason.
            TrainerLost: When the trainer died over it.
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
        """Return the version of the checkpoint that the guard goes back to.

        That is the last one that passed its validation. Without validations it is the newest that
        is ``guard_window`` batches older than ``since``; if none is, the oldest.

        Args:
            since: The first version that looks wrong.
        """
        versions = [_version(folder) for folder in self.whole()]
        good = self.marks().get("good")
        if good is not None and good in versions:
            return good
        return next((v for v in versions if v <= since - self._guard_window), versions[-1])

    async def discard(self, start: int, stop: int) -> None:
        """Remove the checkpoints between two versions, so that no run goes on from them.

        Args:
            start: The version of the last checkpoint that is sound.
            stop: The first version after those that are undone.
        """
        for folder in self.whole():
            if start < _version(folder) < stop:
                await self._remove(folder)

    async def _remove(self, folder: Path) -> None:
        (folder / STATE_FILE).unlink()  # first: what is half removed is no checkpoint
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _surplus(self) -> list[Path]:
        """Return those that are too old to be kept, and not marked.

        With a guard, one stays that is older than its window, and one that will be next.
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
        """Load the newest that can be loaded into the trainer; set those after it aside.

        Raises:
            ConfigError: When there is none.
            TrainerLost: When the trainer died over it.
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
        self._tell(
            f"The checkpoint {folder.name} cannot be loaded ({why}): it is {target} now, and the "
            f"run goes on from version {version}."
        )

    def _none_left(self, bad: dict[Path, str]) -> str:
        if not bad:
            return (
                f"{self._run_dir} holds no checkpoint to go on from: it ended before its training "
                "began; start it anew"
            )
        faults = "; ".join(f"{folder.name}: {why}" for folder, why in bad.items())
        return (
            f"no checkpoint in {self._folder} can be loaded ({faults}); put back a copy of one, or "
            "start a new run"
        )


def _version(folder: Path) -> int:
    return int(folder.name.removeprefix("v"))


def _seal(folder: Path) -> dict[str, list[int]]:
    """Return size and checksum of every file, by its name."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != STATE_FILE)
    return {str(p.relative_to(folder)): [p.stat().st_size, _edges(p)] for p in files}


def _edges(path: Path) -> int:
    """Return the CRC-32 of a file's first and last MiB: reading it all again may take minutes."""
    with path.open("rb") as file:
        checksum = zlib.crc32(file.read(EDGE_BYTES))
        if path.stat().st_size > 2 * EDGE_BYTES:
            file.seek(-EDGE_BYTES, 2)
        return zlib.crc32(file.read(), checksum)


def _check_seal(folder: Path) -> None:
    """Compare the files with what was written.

    Raises:
        ValueError: Where one is missing, or another than it was.
    """
    content = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    for name, (size, checksum) in content.get("files", {}).items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{name} is missing")
        if path.stat().st_size != size:
            raise ValueError(f"{name} has {path.stat().st_size} bytes, not {size}")
        if _edges(path) != checksum:
            raise ValueError(f"{name} has another content than was written")
