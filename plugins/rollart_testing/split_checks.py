"""Check that the tasks of the test split differ from those of the training split.

Takes: a subject, an environment or an agent task. Gives: a check that raises. Never: depends on how
tasks are chosen: it compares observations, with the options and seeds of a run.

A task is identified by its first observation and its secrets. If more than ``MAX_SHARE`` of the
test tasks equal training tasks, which may only mean that first observations are uninformative,
episodes of the expert and of random policies are compared, and the check fails if these are equal
too. No cluster of tasks may be in both splits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from rollart_core.scheduling.tasks import task_seed
from rollart_testing.answers import plain
from rollart_testing.play import Options, Player, Subject
from rollart_testing.results import CheckFailed, SkipCheck, expect

MAX_SHARE: Final = 0.1
"""Share of test tasks that may equal training tasks by chance in small environments."""
MOST: Final = (400, 40)
"""Number of training and test tasks to compare."""
MIN_TASKS: Final = 8
"""Minimum number of tasks per split to compare, without a time limit."""
MAX_TURNS: Final = 12
BUDGET_S: Final = 1.0

MEND: Final = (
    "Success on them is not held out. Let options['split'] and options['task'] choose the task "
    "from lists that share none, or draw it from the seed alone, which differs between splits; or "
    "set disjoint_splits: false in the spec"
)

Shown: TypeAlias = Callable[[Subject, Player, int, Options], str]
"""What a policy can observe of the task of a seed and options."""


def check_splits(subject: Subject) -> str:
    """At most a tenth of the test tasks are training tasks."""
    splits = subject.spec.splits
    if len(splits) < 2:
        raise SkipCheck("its spec names one split")
    train = "train" if "train" in splits else splits[0]
    test = "test" if "test" in splits else splits[-1]
    with subject.open() as player:
        shared = {*_clusters(player, train)} & {*_clusters(player, test)}
        expect(
            not (shared and subject.spec.disjoint_splits),
            f"{len(shared)} clusters are in {train} and in {test}, such as "
            f"{min(shared, default='')!r}: task_clusters(split) must list each in one split only",
        )
        shown = _shown(subject, player, (train, test), _first_page)
        if _too_many(shown[train], shown[test]):
            shown = _shown(subject, player, (train, test), _episodes)
    trained, held_out = shown[train], shown[test]
    if len(trained) > 1 and len(set(trained)) == 1:
        raise SkipCheck(f"the {len(trained)} played tasks of {train} are all equal")
    if _too_many(trained, held_out):
        why = _why((train, trained), (test, held_out))
        if not subject.spec.disjoint_splits:
            raise SkipCheck(f"{why}; its spec says that splits may share tasks")
        raise CheckFailed(f"{why}. {MEND}")
    return f"{len(held_out)} tasks of {test} compared with {len(trained)} of {train}"


def _first_page(subject: Subject, player: Player, seed: int, options: Options) -> str:
    return _text([subject.begin(player, options, seed), _secrets(player)])


def _episodes(subject: Subject, player: Player, seed: int, options: Options) -> str:
    played = [
        subject.play(player, policy, options, seed=seed, max_turns=MAX_TURNS)
        for policy in subject.compared
    ]
    return _text([one.outcomes() for one in played])


def _shown(
    subject: Subject, player: Player, splits: tuple[str, str], show: Shown
) -> dict[str, list[str]]:
    """Return the observations of the first tasks of each split, alternating between splits."""
    found: dict[str, list[str]] = {split: [] for split in splits}
    sizes = {
        s: min(most, player.num_tasks(s) or most) for s, most in zip(splits, MOST, strict=True)
    }
    began = time.monotonic()
    for index in range(max(sizes.values())):
        if index >= MIN_TASKS and time.monotonic() - began > BUDGET_S:
            break
        for split in splits:
            if index < sizes[split]:
                seed = task_seed(subject.seed, split, index)
                found[split].append(show(subject, player, seed, {"task": index, "split": split}))
    return found


def _too_many(trained: Sequence[str], held_out: Sequence[str]) -> bool:
    return _num_known(trained, held_out) > MAX_SHARE * len(held_out)


def _num_known(trained: Sequence[str], held_out: Sequence[str]) -> int:
    known = set(trained)
    return sum(text in known for text in held_out)


def _why(train: tuple[str, Sequence[str]], test: tuple[str, Sequence[str]]) -> str:
    num_known = _num_known(train[1], test[1])
    index = next((i for i, text in enumerate(test[1]) if text in train[1]), 0)
    same = train[1].index(test[1][index]) if num_known else 0
    return (
        f"{num_known} of {len(test[1])} tasks of {test[0]} are tasks of {train[0]}: task {index} "
        f"of {test[0]} is task {same} of {train[0]}"
    )


def _clusters(player: Player, split: str) -> list[str]:
    return player.task_clusters(split) or []


def _secrets(player: Player) -> list[str]:
    return list(player.call("secrets")) if player.has("secrets") else []


def _text(value: object) -> str:
    return json.dumps(plain(value), sort_keys=True)
