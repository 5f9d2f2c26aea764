"""A run whose engine computes other logprobs than the trainer stops before the first update."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.whole_runs import run

from rollart_core.contracts.inference import GenerateRequest, GenerateResult
from rollart_core.errors import LogprobMismatch
from rollart_core.store.journal_reader import JournalReader
from rollart_plugins.engines.embedded import EmbeddedEngine


class BiasedEngine(EmbeddedEngine):
    """Reports logprobs that are too high."""

    def __init__(self, *, nats: float, **options: object) -> None:
        super().__init__(**options)
        self._nats = nats

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        values = [value + self._nats for value in result.inference_logprobs]
        return replace(result, inference_logprobs=values)


BIASED = f"{__name__}:BiasedEngine"


def test_a_mismatch_stops_the_run_before_the_first_update(tmp_path: Path):
    with pytest.raises(LogprobMismatch, match=r"4 answers before .* differ by 0\.2 nats .*is 0\.1"):
        run(tmp_path, engine={"id": BIASED, "nats": 0.2})
    (run_dir,) = tmp_path.glob("runs/*/journal.db")
    with JournalReader(run_dir.parent) as journal:
        assert journal.metrics() == []
        (event,) = journal.events(kind="cross_check")
        assert json.loads(event.payload)["mean"] == pytest.approx(0.2, abs=1e-4)


def test_a_larger_limit_lets_it_run(tmp_path: Path):
    report = run(
        tmp_path,
        engine={"id": BIASED, "nats": 0.2},
        trainer={"max_logprob_mismatch": 0.3},
        stop={"batches": 1},
    )
    assert report.batches == 1
    assert report.cross_check is not None
    assert report.cross_check["mean"] == pytest.approx(0.2, abs=1e-4)


def test_the_embedded_engine_agrees(tmp_path: Path):
    report = run(tmp_path, stop={"batches": 1})
    assert report.cross_check is not None
    assert report.cross_check["answers"] == 4
    assert report.cross_check["max"] < 1e-4
