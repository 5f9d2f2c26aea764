"""The config of `rollart sft`, from files and the command line; batches and long rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollart_core.errors import ConfigError
from rollart_core.types import Sample
from rollart_plugins.sft.config import SftConfig, load_sft_config
from rollart_plugins.sft.rows import Demonstration
from rollart_plugins.sft.run import _batches, _Lengths


def sample_of(length: int, learned: tuple[int, int] = (1, 3)) -> Sample:
    mask = np.zeros(length, dtype=bool)
    mask[slice(*learned)] = True
    zeros = np.zeros(length, dtype=np.int32)
    return Sample(zeros, mask, zeros.astype(np.float32), zeros, zeros)


def config(**given: object) -> SftConfig:
    return SftConfig.model_validate({"model": "m", "data": "a.jsonl", **given})


def test_a_command_line_needs_no_file_and_overrides_one(tmp_path: Path) -> None:
    plain = load_sft_config(["model=./m", "data=a.jsonl", "trainer.lr=1e-4"])
    assert (plain.data, plain.trainer.lr) == (("a.jsonl",), 1e-4)
    file = tmp_path / "sft.yaml"
    file.write_text("model: ./m\ndata: [a.jsonl]\nepochs: 7\n")
    assert load_sft_config([str(file)]).epochs == 7
    mixed = load_sft_config([str(file), "b.jsonl", "epochs=2", "c.parquet", "model.dtype=bfloat16"])
    assert mixed.data == ("b.jsonl", "c.parquet")
    assert (mixed.epochs, mixed.model.dtype) == (2, "bfloat16")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["a.jsonl"], "model: is missing"),
        (["model=m"], "data: is missing"),
        (["a.jsonl", "model=m", "epoch=2"], "epoch: .*Did you mean 'epochs'"),
        (["a.jsonl", "model=m", "epochs=0"], "epochs: must be"),
        (["a.jsonl", "model=m", "batch_rows=2", "batch_tokens=9"], "batch_rows has no effect"),
        (["a.jsonl", "model.kind=new", "lora.rank=4"], "lora needs a trained model"),
        (["a.jsonl", "model=m", "shares={test: 0.5, warm: 0.5}"], "shares: add up to 1"),
        (["a.jsonl", "model=m", "name=a/b"], "name: 'a/b' cannot be part of a folder"),
        (["a.jsonl", "model=m", "preset=math", "answer=a"], "question and answer have no effect"),
        (["a.yaml", "b.yaml"], "give one config file, not a.yaml, b.yaml"),
        (["none.yaml"], "there is no such file"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        load_sft_config(arguments)
    assert "\n" not in str(caught.value)


def test_each_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    rows = [(sample_of(n),) for n in range(4, 24)]
    batches = list(_batches(config(epochs=2, batch_rows=8), rows))
    assert [len(batch) for batch in batches] == [8, 8, 4] * 2
    first, second = ([i for b in part for i in b] for part in (batches[:3], batches[3:]))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert list(_batches(config(epochs=2, batch_rows=8), rows)) == batches
    assert list(_batches(config(epochs=2, batch_rows=8, seed=1), rows)) != batches


def test_a_batch_of_tokens_has_as_many_rows_as_fit_and_at_least_one() -> None:
    rows = [(sample_of(n),) for n in (10, 10, 10, 30, 10)]
    batches = list(_batches(config(epochs=1, batch_tokens=25), rows))
    sizes = [sum(rows[i][0].num_tokens for i in batch) for batch in batches]
    assert sorted(i for batch in batches for i in batch) == [0, 1, 2, 3, 4]
    assert all(size <= 25 or len(batch) == 1 for size, batch in zip(sizes, batches, strict=True))
    assert len(batches) < 5


@pytest.mark.parametrize(
    ("too_long", "lengths", "counts"),
    [("truncate", [[8], [6], []], (1, 1)), ("drop", [[], [6], []], (0, 2))],
)
def test_rows_that_are_too_long_are_cut_or_left_out_and_counted(
    too_long: str, lengths: list[list[int]], counts: tuple[int, int]
) -> None:
    lengths_of = _Lengths(config(max_context_tokens=8, too_long=too_long))
    rows = [sample_of(12), sample_of(6), sample_of(12, learned=(9, 12))]  # nothing left of the last
    kept = [lengths_of.fitting(Demonstration(()), (row,)) for row in rows]
    assert [[s.num_tokens for s in row] for row in kept] == lengths
    assert (lengths_of.truncated, lengths_of.dropped) == counts


def test_rows_that_are_too_long_are_refused_with_the_longest() -> None:
    lengths = _Lengths(config(max_context_tokens=8))
    for n in (9, 12, 8):
        lengths.fitting(Demonstration((), where=f"a.jsonl, row {n}"), (sample_of(n),))
    assert lengths.refusal() == (
        "a.jsonl, row 12: has 12 tokens, above max_context_tokens (8), as 2 rows have: raise "
        "max_context_tokens, or set too_long to truncate or drop"
    )
