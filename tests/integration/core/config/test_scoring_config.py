"""The section ``scoring``: what it takes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollart_core.config.load import dump_yaml, load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.errors import ConfigError

BASE = "env: toy/FrozenLake-v1\nmodel: {kind: new}\nstop: {batches: 2}\n"
SCORED = BASE + "reward: env-return\n"
FAULTY = "rollart_testing:FaultyBackend"
GROUP = "rollart_testing:FakeGroupReward"


def resolved(tmp_path: Path, text: str):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    return resolve_run(load_config(path), source="x.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BASE + "scoring: {max_tries: 2}", "scoring: has no effect without a reward"),
        (SCORED + "scoring: {max_trys: 2}", "scoring.max_trys: unknown key. Did you mean"),
        (SCORED + "scoring: {try_s: 30}", "scoring.try_s: 30 s: must be shorter than deadlines.re"),
        (SCORED + "scoring: {max_tries: 1, backoff_s: 1}", "scoring.backoff_s: has no effect with"),
        (SCORED + "scoring: {max_backoff_s: 0.1}", "scoring.max_backoff_s: 0.1 s: must not be bel"),
        (SCORED + "scoring: {batch_wait_s: 1}", "scoring.batch_wait_s: has no effect with batch_s"),
        (SCORED + "scoring: {fallback: inline}", "scoring.fallback: is the same as the b"),
        (SCORED + "scoring: {backend: inlin}", "scoring.backend: no reward backend 'inlin' is ins"),
        (SCORED + "scoring: {hedge: {quantile: 1}}", "scoring.hedge.quantile: must be above 0 an"),
        (BASE + f"reward: {GROUP}\nscoring: {{batch_size: 2}}", "scoring.batch_size: has no effec"),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(tmp_path, text)
    assert said in str(caught.value)


def test_what_was_resolved_is_read_back_as_it_is(tmp_path: Path) -> None:
    for more in (
        "",
        f"scoring: {{backend: {FAULTY}, fallback: inline, hedge: {{}}, batch_size: 4}}",
        "scoring: {max_tries: 1, breaker: null}",
    ):
        run = resolved(tmp_path, SCORED + more)
        again = resolved(tmp_path, dump_yaml(run.as_dict()))
        assert again.scoring == run.scoring
        assert again.as_dict() == run.as_dict()
    assert "scoring" not in resolved(tmp_path, BASE).as_dict()


@pytest.mark.parametrize(
    ("reward", "backend"),
    [
        ("env-return", "rollart/Inline-v1"),
        ("{id: regex, pattern: a+}", "rollart/Pool-v1"),
        ("rollart_testing:FakeReward", "rollart/Pool-v1"),
        (f"{__name__}:Counts", "rollart/Inline-v1"),
        ("env-return\nscoring: {backend: {num_workers: 1}}", "rollart/Pool-v1"),
    ],
)
def test_a_reward_says_where_it_runs_unless_the_config_does(tmp_path, reward, backend):
    assert resolved(tmp_path, f"{BASE}reward: {reward}").scoring.backend.spec.id == backend


class Counts:
    """A reward that remembers."""

    stateless = False

    async def score(self, request):
        raise NotImplementedError
