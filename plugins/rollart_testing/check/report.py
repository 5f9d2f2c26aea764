"""The report of a check.

Takes: results. Gives: counts, a verdict, JSON. Never: counts a SKIP as a pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rollart_testing.check.catalogue import Group
from rollart_testing.results import CheckOutcome


@dataclass(frozen=True, slots=True)
class Result:
    """One check of one thing."""

    id: str
    """The plugin's id; for static checks, the distribution's name."""
    group: Group
    name: str
    outcome: CheckOutcome
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All checks of one subject."""

    subject: str
    version: str
    """The distribution's version; empty if there is none."""
    results: Sequence[Result]
    distribution: str = ""
    """The package of the subject; empty if there is none."""

    @property
    def title(self) -> str:
        """The subject, and its package with the version."""
        package = f"{self.distribution} {self.version}".strip()
        if self.subject in ("", self.distribution):
            return package
        return f"{self.subject} ({package})" if self.distribution else self.subject

    @property
    def counts(self) -> dict[str, int]:
        """The number of checks by outcome."""
        counted = Counter(result.outcome for result in self.results)
        return {outcome.value: counted[outcome] for outcome in CheckOutcome}

    @property
    def passed(self) -> bool:
        """Whether no check failed, and at least one passed for each checked id."""
        proven = {r.id for r in self.results if r.outcome is CheckOutcome.PASS}
        failed = any(r.outcome is CheckOutcome.FAIL for r in self.results)
        return bool(proven) and not failed and proven == {r.id for r in self.results}

    def to_json(self) -> dict[str, object]:
        """Return the report as plain values."""
        return {
            "subject": self.subject,
            "distribution": self.distribution,
            "version": self.version,
            "passed": self.passed,
            "counts": self.counts,
            "results": [
                {
                    "id": r.id,
                    "group": r.group,
                    "name": r.name,
                    "outcome": r.outcome.value,
                    "reason": r.reason,
                }
                for r in self.results
            ],
        }
