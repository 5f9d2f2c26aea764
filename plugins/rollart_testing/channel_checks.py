"""Contract checks of weight channels: a version is fetched completely or not at all.

Takes: a function that opens ends of a channel. Gives: check results. Never: imports torch before a
check needs a tensor (those checks are skipped if torch is missing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from rollart_core.contracts.weights import WeightChannel
from rollart_testing.results import CheckResult, expect, run_checks, torch_or_skip


def check_weight_channel(
    open_end: Callable[[], WeightChannel], *, keep: int = 2
) -> list[CheckResult]:
    """Check a weight channel.

    Args:
        open_end: Opens an end; all ends must belong to the same channel.
        keep: Number of versions that the channel keeps.
    """
    return run_checks(
        {
            "what_is_published_is_fetched": partial(_check_round_trip, open_end),
            "unknown_version": partial(_check_unknown_version, open_end),
            "keeps_the_newest": partial(_check_keep, open_end, keep),
            "failed_publication": partial(_check_failed_publication, open_end),
            "going_back": partial(_check_going_back, open_end),
            "close_twice": partial(_check_channel_close, open_end),
        }
    )


def _check_round_trip(open_end: Callable[[], WeightChannel]) -> None:
    torch = torch_or_skip()
    sent = {
        "z.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "a.bias": torch.tensor([0.5, -0.5], dtype=torch.bfloat16),
        "scalar": torch.tensor(3, dtype=torch.int64),
    }
    trainer, engine = open_end(), open_end()
    try:
        publication = trainer.publish(1, sent.items())
        num_bytes = sum(tensor.nbytes for tensor in sent.values())
        expect(publication.policy_version == 1, f"it reports version {publication.policy_version}")
        expect(publication.num_bytes == num_bytes, f"{publication.num_bytes} of {num_bytes} bytes")
        for tensor in sent.values():
            tensor.zero_()  # a published version must not change with the trainer's memory
        got = dict(engine.fetch(1))
        expect(list(got) == list(sent), f"the order is {list(got)}, not {list(sent)}")
        for name, tensor in got.items():
            same = (tensor.dtype, tensor.shape) == (sent[name].dtype, sent[name].shape)
            expect(same, f"{name} came as {tensor.dtype} {tuple(tensor.shape)}")
        expect(got["z.weight"].tolist() == [[0, 1, 2], [3, 4, 5]], "z.weight has other values")
        expect(got["a.bias"].tolist() == [0.5, -0.5], "a.bias has other values")
    finally:
        engine.close()
        trainer.close()


def _check_unknown_version(open_end: Callable[[], WeightChannel]) -> None:
    end = open_end()
    try:
        list(end.fetch(987_654))
    except LookupError:
        return
    finally:
        end.close()
    expect(False, "fetching a version that was never published raises no LookupError")


def _check_keep(open_end: Callable[[], WeightChannel], keep: int) -> None:
    torch = torch_or_skip()
    trainer, engine = open_end(), open_end()
    try:
        for version in range(1, keep + 2):
            trainer.publish(version, [("w", torch.full((2,), float(version)))])
        for version in range(2, keep + 2):
            got = dict(engine.fetch(version))["w"].tolist()
            expect(got == [version, version], f"version {version} holds {got}")
    finally:
        engine.close()
        trainer.close()


def _check_failed_publication(open_end: Callable[[], WeightChannel]) -> None:
    torch = torch_or_skip()
    trainer, engine = open_end(), open_end()

    def breaks() -> Iterator[tuple[str, Any]]:
        yield "w", torch.ones(2)
        raise RuntimeError("no more tensors")

    try:
        trainer.publish(1, [("w", torch.zeros(2)), ("v", torch.zeros(1))])
        try:
            trainer.publish(2, breaks())
        except RuntimeError:
            expect(not _holds(engine, 2), "half a version can be fetched")
        else:
            expect(False, "an error of the tensors to publish is swallowed")
        expect(dict(engine.fetch(1))["w"].tolist() == [0, 0], "the version before is damaged")
        trainer.publish(2, [("w", torch.ones(2)), ("v", torch.ones(1))])
        expect(dict(engine.fetch(2))["w"].tolist() == [1, 1], "the next publication is damaged")
    finally:
        engine.close()
        trainer.close()


def _check_going_back(open_end: Callable[[], WeightChannel]) -> None:
    torch = torch_or_skip()
    trainer, engine = open_end(), open_end()
    try:
        for version, value in ((5, 5.0), (6, 6.0), (5, 7.0)):
            trainer.publish(version, [("w", torch.full((2,), value))])
        newest = engine.newest()
        expect(newest in (None, 5), f"newest() is {newest}, but version 5 was published last")
        expect(dict(engine.fetch(5))["w"].tolist() == [7, 7], "version 5 is not the later one")
        expect(not _holds(engine, 6), "version 6, which was rolled back, can still be fetched")
    finally:
        engine.close()
        trainer.close()


def _holds(channel: WeightChannel, policy_version: int) -> bool:
    try:
        list(channel.fetch(policy_version))
    except LookupError:
        return False
    return True


def _check_channel_close(open_end: Callable[[], WeightChannel]) -> None:
    end = open_end()
    end.close()
    end.close()
