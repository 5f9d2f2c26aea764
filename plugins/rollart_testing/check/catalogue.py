"""The names of all checks by kind and group; docs/reference/checks.md explains each one.

Takes: nothing. Gives: the checks of each kind in the order of the report, and the names that
``--only`` accepts. Never: runs a check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias

from rollart_core.errors import UserError, did_you_mean

Group: TypeAlias = Literal["static", "runtime", "semantic"]
GROUPS: Final[tuple[Group, ...]] = ("static", "runtime", "semantic")

STATIC: Final = (
    "contract_version",
    "manifest",
    "entry_point",
    "manifest_agrees",
    "pins",
    "lazy_import",
    "import_time",
    "licence",
)
"""Static checks of a distribution."""

PACKAGE: Final = ("own_tests",)
"""Checks of a distribution in the group runtime."""

ENVIRONMENT_RUNTIME: Final = (
    "make",
    "reset",
    "step",
    "tasks",
    "gymnasium_check_env",
    "same_seed_same_episode",
    "fresh_processes_agree",
    "reset_in_the_middle",
    "global_random_state",
    "interleaved_instances",
    "async_agrees",
    "corpus",
    "nothing_left_open",
    "no_box_left",
    "within_timeouts",
    "close_twice",
    "works_offline",
)
ENVIRONMENT_SEMANTIC: Final = (
    "splits_differ",
    "oracle_reaches_the_top",
    "noop_stays_at_the_floor",
    "random_stays_below_the_oracle",
    "same_verdict_twice",
    "secrets_are_hidden",
    "box_hides_secrets",
    "malformed_actions",
    "reward_in_range",
)

AGENT_RUNTIME: Final = (
    "make",
    "prepare",
    "run",
    "finish",
    "tasks",
    "same_seed_same_episode",
    "fresh_processes_agree",
    "global_random_state",
    "interleaved_instances",
    "refused_requests",
    "ends_when_cancelled",
    "corpus",
    "nothing_left_open",
    "no_box_left",
    "within_timeouts",
    "close_twice",
    "works_offline",
)
"""Checks of an agent environment; shared names have the same meaning as elsewhere."""

AGENTS: Final = "agents"
"""The kind of agent environments here; elsewhere they are environments."""

PARTS: Final[Mapping[str, Mapping[Group, Sequence[str]]]] = {
    "environments": {"runtime": ENVIRONMENT_RUNTIME, "semantic": ENVIRONMENT_SEMANTIC},
    AGENTS: {"runtime": AGENT_RUNTIME, "semantic": ENVIRONMENT_SEMANTIC},
    "rewards": {
        "runtime": ("make", "group_size"),
        "semantic": ("score", "same_request_same_score", "examples"),
    },
    "algorithms": {
        "runtime": (
            "make",
            "advantages",
            "alike_members",
            "loss",
            "microbatches",
            "direction",
            "targets",
            "extra_modules",
        )
    },
    "hardware_mappers": {
        "runtime": (
            "make",
            "places_everything",
            "same_input_same_placement",
            "refuses_no_pools",
        )
    },
    "inference_engines": {
        "runtime": (
            "make",
            "start",
            "generate",
            "at_once",
            "greedy_repeats",
            "sampling_key_repeats",
            "stop_tokens",
            "session",
            "pause_abort_resume",
            "score",
            "stats",
            "close_twice",
        )
    },
    "sandboxes": {
        "runtime": (
            "make",
            "start",
            "exec",
            "timeout",
            "output_cap",
            "files",
            "snapshot",
            "close_twice",
        )
    },
    "reward_backends": {"runtime": ("make", "score", "nothing_to_score", "close_twice")},
    "weight_channels": {
        "runtime": (
            "make",
            "what_is_published_is_fetched",
            "unknown_version",
            "keeps_the_newest",
            "failed_publication",
            "going_back",
            "close_twice",
        )
    },
    "trackers": {"runtime": ("make", "logs", "close_before_start")},
    "runtimes": {"runtime": ("make", "offers_every_part")},
    "forward_passes": {"runtime": ("make", "agrees_with_the_model")},
    "sandbox_services": {
        "runtime": ("make", "describes", "isolates", "refuses", "collects_garbage")
    },
    "tool_formats": {"runtime": ("make", "round_trip", "plain_text", "broken_calls")},
}
"""Kind -> group -> checks; other kinds have none."""


def checks_of(kind: str, only: Sequence[str] = ()) -> list[tuple[Group, str]]:
    """Return the checks of a kind that ``only`` (groups, names; empty means all) selects."""
    return [
        (group, name)
        for group, names in PARTS.get(kind, {}).items()
        for name in names
        if wanted(group, name, only)
    ]


def wanted(group: Group, name: str, only: Sequence[str]) -> bool:
    """Return whether ``only`` selects a check."""
    return not only or group in only or name in only


def checked_only(only: Sequence[str]) -> tuple[str, ...]:
    """Return the groups and names of ``--only``, which may be separated by commas.

    Raises:
        UserError: If a word is neither a group nor a check.
    """
    asked = tuple(word.strip() for item in only for word in item.split(",") if word.strip())
    names = {n for groups in PARTS.values() for ns in groups.values() for n in ns}
    names |= {*STATIC, *PACKAGE}
    for word in asked:
        if word not in names and word not in GROUPS:
            near = did_you_mean(word, sorted({*names, *GROUPS}))
            raise UserError(
                f"{word!r} is neither a group ({', '.join(GROUPS)}) nor a check.{near} "
                "The page Checks of the documentation lists them."
            )
    return asked
