"""Read rows from files: JSON lines, Parquet, CSV, and datasets of Hugging Face.

    train.jsonl  train.parquet  train.csv     one split
    a folder with train.jsonl and test.jsonl  a split for each file
    a folder of `save_to_disk`, OWNER/NAME    the splits of the dataset (needs `datasets`)

Takes: a path or a hub id. Gives: every row with its number, or the problem of a row. Never: drops a
row silently, or guesses the format of a file.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from rollart_core.errors import UserError, first_line

Row: TypeAlias = Mapping[str, object]

FORMATS: Final = (".jsonl", ".parquet", ".csv")
"""Endings of the files that can be read."""
_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_SAVED: Final = ("dataset_dict.json", "dataset_info.json")
"""Files in a folder of ``save_to_disk``: of several splits, or of one."""


class RowError(ValueError):
    """A row that cannot be used; the message has the field, its value and what is allowed."""

    def __init__(self, field_name: str, problem: str) -> None:
        super().__init__(f"field {field_name!r}: {problem}")
        self.field = field_name


class TaskFileError(UserError, ValueError):
    """A file of rows that cannot be read; the message has the file, the row and the field."""


def read_rows(path: Path) -> Iterator[tuple[int, Row | RowError]]:
    """Yield the number of each row of a file, from 1, and the row or its problem.

    In JSON lines the number is that of the line.

    Raises:
        TaskFileError: If the file cannot be read.
    """
    kinds = {".jsonl": _json_rows, ".parquet": _parquet_rows, ".csv": _csv_rows}
    if not path.exists():
        raise TaskFileError(f"{path}: there is no such file")
    if path.suffix not in kinds:
        raise TaskFileError(f"{path}: has to end in {', '.join(FORMATS)}")
    try:
        yield from kinds[path.suffix](path)
    except OSError as error:
        raise TaskFileError(f"{path}: {error.strerror or error}") from None


def missing_files(**named: Path | None) -> dict[str, str]:
    """Return a problem for each option whose file is missing.

    Args:
        named: Option -> the file that it names; None: no file.
    """
    return {
        option: f"{path} is a folder, not a file" if path.is_dir() else f"there is no file {path}"
        for option, path in named.items()
        if path is not None and not path.is_file()
    }


def is_hub_id(source: str) -> bool:
    """Return whether a source is the id of a dataset on the Hugging Face hub, and not a path."""
    return (
        _HUB_ID.fullmatch(source) is not None
        and not Path(source).exists()
        and Path(source).suffix not in FORMATS
    )


def split_sources(source: str, subset: str | None) -> dict[str, Path | Any]:
    """Return the splits of a source: name -> a file, or a dataset of ``datasets``.

    A single file is the split with an empty name.

    Args:
        source: A file, a folder or a hub id.
        subset: Subset (config) of a dataset on the hub.

    Raises:
        TaskFileError: If it cannot be opened.
    """
    path = Path(source).expanduser()
    if is_hub_id(source):
        return _of_hub(source, subset)
    if not path.is_dir():
        return {"": path}
    if any((path / name).is_file() for name in _SAVED):
        return _named(_datasets(source).load_from_disk(str(path)))
    files = sorted(file for file in path.iterdir() if file.suffix in FORMATS)
    if not files:
        raise TaskFileError(
            f"{path}: the folder has no file that ends in {', '.join(FORMATS)}, and it was not "
            "saved by `save_to_disk` of datasets"
        )
    found: dict[str, Path | Any] = {}
    for file in files:
        if file.stem in found:
            raise TaskFileError(f"{path}: has two files for the split {file.stem}; remove one")
        found[file.stem] = file
    return found


def rows_of(part: Path | Any) -> Iterator[tuple[int, Row | RowError]]:
    """Yield the numbered rows of one split of :func:`split_sources`."""
    return read_rows(part) if isinstance(part, Path) else enumerate(part, start=1)


def _json_rows(path: Path) -> Iterator[tuple[int, Row | RowError]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _json_row(line)


def _json_row(line: bytes) -> Row | RowError:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # broken UTF-8 is a ValueError as well
        return RowError("(the whole line)", f"is no JSON: {error}")
    if not isinstance(value, dict):
        return RowError("(the whole line)", f"is a {type(value).__name__}, no JSON object")
    return value


def _parquet_rows(path: Path) -> Iterator[tuple[int, Row | RowError]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=64):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except pa.ArrowInvalid as error:
        raise TaskFileError(f"{path}: cannot be read as Parquet: {error}") from None


def _csv_rows(path: Path) -> Iterator[tuple[int, Row | RowError]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for number, row in enumerate(reader, start=1):
                uneven = None in row or None in row.values()
                names = len(reader.fieldnames or ())
                problem = f"does not have {names} values, as the first line has names"
                yield number, RowError("(the whole row)", problem) if uneven else row
        except (csv.Error, UnicodeDecodeError) as error:
            message = f"{path}, line {reader.line_num + 1}: is no CSV in UTF-8: {error}"
            raise TaskFileError(message) from None


def _of_hub(source: str, subset: str | None) -> dict[str, Any]:
    datasets = _datasets(source)
    try:
        return _named(datasets.load_dataset(source, subset))
    except Exception as e:  # of many packages: the hub's client, the network, the dataset
        cache = datasets.config.HF_DATASETS_CACHE
        raise TaskFileError(
            f"{source}: is neither a file here nor a dataset that can be loaded from the hub or "
            f"from the cache in {cache} ({type(e).__name__}: {first_line(str(e), 200)}). To fill "
            f"the cache, run on a machine with network: {_download(source, subset)}"
        ) from None


def _download(source: str, subset: str | None) -> str:
    which = f'"{source}", "{subset}"' if subset else f'"{source}"'
    return f"python -c 'import datasets; datasets.load_dataset({which})'"


def _named(loaded: Any) -> dict[str, Any]:
    return dict(loaded) if isinstance(loaded, Mapping) else {"": loaded}


def _datasets(source: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise TaskFileError(
            f"{source}: needs the package datasets: pip install 'rollart[datasets]'; or give a "
            f"file that ends in {', '.join(FORMATS)}"
        ) from None
    return datasets
