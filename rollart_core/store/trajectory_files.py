"""Trajectories as Parquet: one row per trajectory; a shard is written, then renamed.

Takes: :class:`Trajectory` records. Gives: Parquet shards, compressed blobs of one trajectory each
(which the journal stores until the shard is on disk), and the records again. Never: accesses the
journal; the journal's writer thread calls this module.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from rollart_core.types import Failure, FailureKind, Sample, Status, Task, Ticket, Trajectory, Turn

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = "trajectories"
_BLOB_SIZES = struct.Struct("<qq")
"""Header of a blob: bytes of the JSON, and bytes of all content before compression."""
_CHUNK = 32
"""Rows per conversion to Arrow: enough for low overhead, few enough to hold the GIL briefly."""


class ShardWriter:
    """Collects rows and writes them as ``part-000001.parquet``, ``part-000002.parquet``, ...

    Its memory is bounded: the owner calls :meth:`write` when :attr:`is_full`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rows_per_shard: int = 512,
        bytes_per_shard: int = 32 * 2**20,
        next_number: int = 1,
    ) -> None:
        """Create the writer; no file is written yet.

        Args:
            folder: The folder of the shards; it is created if it does not exist.
            rows_per_shard: Maximum number of rows of a shard.
            bytes_per_shard: Maximum size of a shard in memory, in bytes.
            next_number: Number of the first shard; a file with that number is replaced.
        """
        self._folder = folder
        self._rows_per_shard = rows_per_shard
        self._bytes_per_shard = bytes_per_shard
        self._number = next_number
        self._fresh: list[Trajectory] = []
        self._batches: list[pa.RecordBatch] = []
        self._num_rows = 0
        self._num_bytes = 0

    def __len__(self) -> int:
        """Return the number of rows that are not written yet."""
        return self._num_rows

    @property
    def is_full(self) -> bool:
        """True if the rows should be written now."""
        return len(self) >= self._rows_per_shard or self._num_bytes >= self._bytes_per_shard

    def add(self, trajectory: Trajectory, num_bytes: int) -> None:
        """Add one trajectory of about ``num_bytes`` in memory."""
        self._fresh.append(trajectory)
        self._num_rows += 1
        self._num_bytes += num_bytes
        if len(self._fresh) >= _CHUNK:
            self._to_columns()

    def write(self) -> str | None:
        """Write the added rows in order; return the file's name, or None if there are none.

        Raises:
            OSError: If the file cannot be written; the rows are kept.
        """
        if not self._num_rows:
            return None
        self._to_columns()
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"part-{self._number:06d}.parquet"
        beside = self._folder / f"{name}.part"
        with beside.open("wb") as file:
            pq.write_table(pa.Table.from_batches(self._batches), file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self._folder / name)
        self._number += 1
        self._batches = []
        self._num_rows = self._num_bytes = 0
        return name

    def _to_columns(self) -> None:
        if self._fresh:
            self._batches.append(to_rows(self._fresh))
            self._fresh = []


def to_rows(trajectories: Sequence[Trajectory]) -> pa.RecordBatch:
    """Return trajectories as Arrow columns, one row each."""
    import pyarrow as pa

    schema = _schema()
    dicts = [_as_dict(t) for t in trajectories]
    columns = [pa.array([d[f.name] for d in dicts], f.type) for f in schema if f.name in dicts[0]]
    return pa.RecordBatch.from_arrays([*columns, _samples_column(trajectories)], schema=schema)


def from_rows(rows: pa.RecordBatch | pa.Table) -> list[Trajectory]:
    """Return the trajectories of Arrow rows."""
    return [_from_dict(row) for row in cast("list[dict[str, object]]", rows.to_pylist())]


def pack(trajectory: Trajectory) -> bytes:
    """Return a trajectory as a compressed blob: JSON of its fields, then raw token arrays."""
    import pyarrow as pa

    samples = trajectory.samples
    rows = [_joined([getattr(s, k) for s in samples], t) for k, t in _SAMPLE_TYPES.items()]
    fields = _as_dict(trajectory) | {"lengths": [s.num_tokens for s in samples]}
    head = json.dumps(fields).encode()
    content = b"".join([head, *(row.tobytes() for row in rows)])
    sizes = _BLOB_SIZES.pack(len(head), len(content))
    return sizes + cast("bytes", pa.compress(content, codec="zstd", asbytes=True))


def unpack(blob: bytes) -> Trajectory:
    """Return the trajectory of a blob."""
    import pyarrow as pa

    head_size, size = _BLOB_SIZES.unpack_from(blob)
    compressed = memoryview(blob)[_BLOB_SIZES.size :]
    content = pa.decompress(compressed, decompressed_size=size, codec="zstd", asbytes=True)
    fields: dict[str, object] = json.loads(content[:head_size])
    lengths = cast("list[int]", fields.pop("lengths"))
    fields["samples"] = _unpack_samples(content[head_size:], lengths)
    return _from_dict(fields)


def _unpack_samples(content: bytes, lengths: Sequence[int]) -> list[dict[str, object]]:
    columns: dict[str, list[npt.NDArray[np.generic]]] = {}
    total, offset = sum(lengths), 0
    for name, kind in _SAMPLE_TYPES.items():
        row = np.frombuffer(content, np.dtype(kind), total, offset)
        offset += row.nbytes
        columns[name] = np.split(row, np.cumsum(lengths)[:-1]) if lengths else []
    return [{k: column[i] for k, column in columns.items()} for i in range(len(lengths))]


def read_shard(path: Path) -> list[Trajectory]:
    """Return the trajectories of a shard, in the order written.

    Raises:
        OSError: If it cannot be read.
    """
    import pyarrow.parquet as pq

    return from_rows(pq.read_table(path))


def clean_text(text: str) -> str:
    """Return ``text`` with lone surrogates, which UTF-8 cannot encode, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def as_float(value: float | None) -> float | None:
    """Return a plain float; environments may return numpy's types."""
    return None if value is None else float(value)


def as_bool(value: bool | None) -> bool | None:
    """Return a plain bool."""
    return None if value is None else bool(value)


@cache
def _schema() -> pa.Schema:
    import pyarrow as pa

    turn = pa.struct(
        [
            ("observation", pa.string()),
            ("action", pa.string()),
            ("num_prompt_tokens", pa.int32()),
            ("num_new_tokens", pa.int32()),
            ("finish_reason", pa.string()),
            *((name, pa.float64()) for name in ("reward", "generate_s", "step_s")),
            ("messages", pa.string()),
            ("continues", pa.int32()),
            ("tools", pa.string()),
        ]
    )
    sample = pa.struct(
        [(name, pa.list_(pa.from_numpy_dtype(kind))) for name, kind in _SAMPLE_TYPES.items()]
    )
    failure = pa.struct(
        [
            ("kind", pa.string()),
            ("boundary", pa.string()),
            ("message", pa.string()),
            ("retryable", pa.bool_()),
            ("detail", pa.string()),
        ]
    )
    return pa.schema(
        [
            ("ticket_id", pa.string()),
            ("group_id", pa.string()),
            ("index", pa.int32()),
            ("attempt", pa.int32()),
            ("env_id", pa.string()),
            ("split", pa.string()),
            ("task_index", pa.int64()),
            ("task_seed", pa.int64()),
            ("status", pa.string()),
            ("reward", pa.float64()),
            ("score", pa.float64()),
            ("success", pa.bool_()),
            ("reward_components", pa.map_(pa.string(), pa.float64())),
            ("env_components", pa.map_(pa.string(), pa.float64())),
            ("context", pa.string()),
            ("failure", failure),
            ("start_version", pa.int64()),
            ("oldest_version", pa.int64()),
            ("wall_s", pa.float64()),
            ("turns", pa.list_(turn)),
            ("samples", pa.list_(sample)),
        ]
    )


_SAMPLE_TYPES: Mapping[str, type] = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "inference_logprobs": np.float32,
    "policy_versions": np.int32,
    "turn_ids": np.int32,
}


def _as_dict(trajectory: Trajectory) -> dict[str, object]:
    ticket, task = trajectory.ticket, trajectory.ticket.task
    return {
        "ticket_id": ticket.ticket_id,
        "group_id": ticket.group_id,
        "index": ticket.index,
        "attempt": ticket.attempt,
        "env_id": task.env_id,
        "split": task.split,
        "task_index": task.index,
        "task_seed": task.seed,
        "status": trajectory.status,
        "reward": as_float(trajectory.reward),
        "score": as_float(trajectory.score),
        "success": as_bool(trajectory.success),
        "reward_components": _pairs(trajectory.reward_components),
        "env_components": _pairs(trajectory.env_components),
        "context": _as_json(trajectory.context),
        "failure": _failure_as_dict(trajectory.failure),
        "start_version": trajectory.start_version,
        "oldest_version": trajectory.oldest_version,
        "wall_s": trajectory.wall_s,
        "turns": [_turn_as_dict(t) for t in trajectory.turns],
    }


def _samples_column(trajectories: Sequence[Trajectory]) -> pa.Array:
    """Return the column of the token arrays, without creating a Python object per token."""
    import pyarrow as pa

    samples = [s for t in trajectories for s in t.samples]
    offsets = _offsets([s.num_tokens for s in samples])
    rows = [
        pa.ListArray.from_arrays(offsets, pa.array(_joined([getattr(s, k) for s in samples], t)))
        for k, t in _SAMPLE_TYPES.items()
    ]
    structs = pa.StructArray.from_arrays(rows, list(_SAMPLE_TYPES))
    return pa.ListArray.from_arrays(_offsets([len(t.samples) for t in trajectories]), structs)


def _offsets(lengths: Sequence[int]) -> pa.Array:
    import pyarrow as pa

    return pa.array(np.cumsum([0, *lengths], dtype=np.int32))


def _joined(rows: list[npt.NDArray[np.generic]], dtype: type) -> npt.NDArray[np.generic]:
    return np.concatenate([np.empty(0, dtype), *(np.asarray(r, dtype) for r in rows)])


def _turn_as_dict(turn: Turn) -> dict[str, object]:
    return {
        "observation": clean_text(turn.observation),
        "action": clean_text(turn.action),
        "num_prompt_tokens": turn.num_prompt_tokens,
        "num_new_tokens": turn.num_new_tokens,
        "finish_reason": turn.finish_reason,
        "reward": float(turn.reward),
        "generate_s": turn.generate_s,
        "step_s": turn.step_s,
        "messages": _as_json(turn.messages),
        "continues": turn.continues,
        "tools": _as_json(turn.tools),
    }


def _pairs(components: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(clean_text(name), float(value)) for name, value in components.items()]


def _as_json(value: Sequence[object] | Mapping[str, object]) -> str | None:
    """Return JSON; None for an empty value, which takes no space."""
    return clean_text(json.dumps(value, ensure_ascii=False, default=str)) if value else None


def _failure_as_dict(failure: Failure | None) -> dict[str, object] | None:
    if failure is None:
        return None
    texts = {"message": clean_text(failure.message), "detail": clean_text(failure.detail)}
    return {**asdict(failure), "kind": failure.kind.value, **texts}


def _from_dict(row: dict[str, object]) -> Trajectory:
    get = cast("dict[str, str]", row)  # plain JSON-like values; the schema has their types
    task = Task(get["env_id"], get["split"], int(get["task_index"]), int(get["task_seed"]))
    ticket = Ticket(get["ticket_id"], task, get["group_id"], int(get["index"]), int(get["attempt"]))
    components = cast("dict[str, Iterable[tuple[str, float]]]", row)
    return Trajectory(
        ticket=ticket,
        status=cast("Status", row["status"]),
        samples=tuple(_sample(s) for s in cast("list[dict[str, object]]", row["samples"])),
        turns=tuple(_turn(t) for t in cast("list[dict[str, Any]]", row["turns"])),
        reward=cast("float | None", row["reward"]),
        score=cast("float | None", row["score"]),
        success=cast("bool | None", row["success"]),
        reward_components=dict(components["reward_components"]),
        env_components=dict(components.get("env_components") or ()),  # not in older records
        context=json.loads(get.get("context") or "{}"),
        failure=_failure(cast("dict[str, object] | None", row["failure"])),
        start_version=int(get["start_version"]),
        wall_s=float(get["wall_s"]),
    )


def _sample(row: dict[str, object]) -> Sample:
    arrays: dict[str, Any] = {k: np.array(row[k], dtype) for k, dtype in _SAMPLE_TYPES.items()}
    return Sample(**arrays)


def _turn(row: dict[str, Any]) -> Turn:
    lists = {k: tuple(json.loads(row.get(k) or "[]")) for k in ("messages", "tools")}
    return Turn(**{**row, **lists})


def _failure(row: dict[str, object] | None) -> Failure | None:
    if row is None:
        return None
    return Failure(**{**row, "kind": FailureKind(row["kind"])})  # type: ignore[arg-type]


def trajectory_bytes(trajectory: Trajectory) -> int:
    """Return the size of a trajectory's token arrays and texts, in bytes."""
    texts = sum(
        len(t.observation) + len(t.action) + sum(len(m["content"]) for m in t.messages)
        for t in trajectory.turns
    )
    rows: int = sum(getattr(s, k).nbytes for s in trajectory.samples for k in _SAMPLE_TYPES)
    return texts + rows
