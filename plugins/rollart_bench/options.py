"""Typed access to the options of a benchmark.

Takes: the values of the command line, as YAML reads them. Gives: checked values. Never: defines the
options of a benchmark; its ``TAKES`` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from rollart_core.errors import UserError, did_you_mean

_TRUE: Final = ("true", "yes", "on", "1")
_FALSE: Final = ("false", "no", "off", "0")
_MOST: Final = 1_000_000_000
"""Upper bound of every count, rate and time."""


class Options:
    """The options of one call. A wrong value raises a one-line error that names the option.

    Args:
        bench: The name of the benchmark, for errors.
        given: Option -> value.
    """

    def __init__(self, bench: str, given: Mapping[str, object]) -> None:
        self._bench = bench
        self._given = given
        self.short: Final = self.flag("short")
        """Whether the short form is requested."""

    def flag(self, name: str) -> bool:
        """Return a flag. Default: False.

        Raises:
            UserError: If it is neither true nor false.
        """
        value = self._given.get(name, False)
        if isinstance(value, int) and value in (0, 1):  # also True and False
            return bool(value)
        word = value.strip().lower() if isinstance(value, str) else ""
        if word not in (*_TRUE, *_FALSE):
            self._refuse(name, "true or false", "true")
        return word in _TRUE

    def integer(self, name: str, default: int, *, least: int = 1) -> int:
        """Return a whole number.

        Raises:
            UserError: If it is not a whole number, is less than ``least``, or is above 1e9.
        """
        value = self._given.get(name, default)
        number = self._number(value, int)
        if number is None or number < least:
            self._refuse(name, f"a whole number, {least} or more", str(max(least, default)))
        if number > _MOST:
            self._refuse(name, f"a whole number, {_MOST} at most", str(max(least, default)))
        return int(number)

    def number(self, name: str, default: float) -> float:
        """Return a number above 0 and up to 1e9.

        Raises:
            UserError: If it is not such a number.
        """
        value = self._given.get(name, default)
        number = self._number(value, float)
        if number is None or not 0 < number < math.inf:
            self._refuse(name, "a number above 0", f"{default:g}")
        if number > _MOST:
            self._refuse(name, f"a number, {_MOST} at most", f"{default:g}")
        return number

    def text(self, name: str, default: str) -> str:
        """Return a text. Only the default may be empty.

        Raises:
            UserError: If it is not a text.
        """
        value = self._given.get(name, default)
        if not isinstance(value, str) or (name in self._given and not value.strip()):
            self._refuse(name, "a text", default or "TEXT")
        return value

    def path(self, name: str, default: str) -> Path:
        """Return a path.

        Raises:
            UserError: If it is not a text.
        """
        return Path(self.text(name, default))

    def choice(self, name: str, known: Sequence[str], default: str) -> str:
        """Return one of several words.

        Raises:
            UserError: If it is not one of them.
        """
        (chosen,) = self.names(name, known, (default,), most=1)
        return chosen

    def names(
        self,
        name: str,
        known: Sequence[str],
        default: Sequence[str] | None = None,
        *,
        most: int | None = None,
    ) -> tuple[str, ...]:
        """Return names, given as ``a,b`` or ``[a, b]``.

        Args:
            name: The option.
            known: The allowed names. If empty, any name is allowed.
            default: The result if the option is not given. If None, all known names.
            most: The maximum number of names.

        Raises:
            UserError: If a name is not known, or no name is given.
        """
        if name not in self._given:
            return tuple(known if default is None else default)
        value = self._given[name]
        given = value.split(",") if isinstance(value, str) else value
        allowed = f"one of {', '.join(known)}" if known else "names"
        example = known[0] if known else "NAME"
        if not isinstance(given, list | tuple) or not all(isinstance(one, str) for one in given):
            self._refuse(name, allowed, example)
        names = tuple(dict.fromkeys(filter(None, (one.strip() for one in given))))
        unknown = [one for one in names if known and one not in known]
        if unknown:
            near = did_you_mean(unknown[0], tuple(known))
            raise UserError(
                f"bench {self._bench}: {name}: {unknown[0]!r} is none of {', '.join(known)}.{near}"
            )
        if not names or (most is not None and len(names) > most):
            self._refuse(name, allowed, example)
        return names

    def __contains__(self, name: str) -> bool:
        """Return whether an option was given."""
        return name in self._given

    @staticmethod
    def _number(value: object, kind: type[int] | type[float]) -> float | None:
        """Return a value as a number of a type; None if it is not such a number."""
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            return None
        try:
            number = kind(value)
        except (ValueError, OverflowError):
            return None
        return None if isinstance(value, float) and number != value else number

    def _refuse(self, name: str, allowed: str, example: str) -> NoReturn:
        raise UserError(
            f"bench {self._bench}: {name}={self._given[name]!r}: must be {allowed}, "
            f"such as {name}={example}"
        )
