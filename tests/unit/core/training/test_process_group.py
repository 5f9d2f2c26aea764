"""Who counts the CUDA devices of a machine before ranks share them; no device and no group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollart_core.errors import ConfigError
from rollart_core.training import process_group


class Met:
    """The store of ranks that are all there."""

    def set(self, *_: object) -> None: ...

    def wait(self, *_: object) -> None: ...


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One CUDA device, on a machine whose only address is the loopback one."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(process_group, "_store", lambda *_, **__: Met())
    monkeypatch.setattr(process_group, "_talk_over", lambda _: None)
    monkeypatch.setattr(process_group.dist, "init_process_group", lambda *_, **__: None)
    return taken


def join(**settings: Any) -> None:
    process_group.join("127.0.0.1:1", 1, 2, device="cuda", **settings)


def test_ranks_that_share_a_machine_need_a_device_each(chosen: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"num_trainer_ranks: 2 ranks .* machine has 1"):
        join()
    assert chosen == []


def test_a_rank_with_a_device_of_its_own_is_not_told_to_share(chosen: list[int]) -> None:
    join(own_devices=True)
    assert chosen == [0]
