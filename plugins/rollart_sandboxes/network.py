"""The hosts that a sandbox can reach: names, names below a name, and ports.

Takes: names from a config. Gives: whether a host and port are allowed, and which of a name's
addresses are allowed as connection targets. Never: resolves or connects.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

PORTS: Final = (80, 443)
"""The ports that a name without a port allows."""
_NAME: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class Rule:
    """One allowed host: a name, all names below one, or an address."""

    name: str
    below: bool
    ports: tuple[int, ...]

    def allows(self, host: str, port: int) -> bool:
        """Return whether the rule covers this host, as :func:`canonical` returns it, and port."""
        named = host.endswith(f".{self.name}") if self.below else host == self.name
        return named and port in self.ports

    def __str__(self) -> str:
        host = f"[{self.name}]" if ":" in self.name else self.name
        port = "" if self.ports == PORTS else f":{self.ports[0]}"
        return f"{'*.' if self.below else ''}{host}{port}"


def rule(text: str) -> Rule:
    """Parse ``pypi.org``, ``*.pypi.org``, ``pypi.org:8443``, ``10.0.0.7:80`` or ``[fd00::1]:80``.

    Raises:
        ValueError: For anything else, including a URL or a bare ``*``.
    """
    below = text.startswith("*.")
    try:
        host, port = split(text[2:] if below else text)
        if below and address(host) is not None:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"network: {text!r} is not a host that can be allowed: write a name such as pypi.org, "
            "*.pypi.org (all names below it) or pypi.org:8443, or an address"
        ) from None
    return Rule(host, below, PORTS if port is None else (port,))


def split(text: str) -> tuple[str, int | None]:
    """Return the host, canonical, and the port of ``host[:port]``.

    Raises:
        ValueError: If the text has another form.
    """
    if text.count(":") > 1 and not text.startswith("["):
        return canonical(text), None
    found = re.fullmatch(r"(\[[^]]+\]|[^:\[\]]+)(?::([0-9]{1,5}))?", text)
    if found is None:
        raise ValueError(f"not a host: {text!r}")
    port = None if found[2] is None else int(found[2])
    if port is not None and not 0 < port < 65536:
        raise ValueError(f"not a port: {port}")
    return canonical(found[1].strip("[]")), port


def canonical(host: str) -> str:
    """Return a host in the canonical form that is used for comparison.

    Raises:
        ValueError: If it is neither a name nor an address.
    """
    known = address(host)
    if known is not None:
        return str(known)
    try:
        name = host.removesuffix(".").encode("idna").decode("ascii").lower()
    except UnicodeError:
        raise ValueError(f"not a host: {host!r}") from None
    # Some resolvers read a last part of digits (127.1, 0x7f.1, 2130706433) as an address.
    if not _NAME.fullmatch(name) or re.fullmatch(r"[0-9]+|0x[0-9a-f]*", name.split(".")[-1]):
        raise ValueError(f"not a host: {host!r}")
    return name


def address(host: str) -> Address | None:
    """Return the address if a host is written as one, None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def public(found: Address) -> bool:
    """Return whether an address, or the one it embeds, is public: not private, local or special."""
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if inner is None and found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return public(inner)
        if found.teredo is not None:
            return False
    return found.is_global and not found.is_multicast


def allowed(rules: Iterable[Rule], host: str, port: int) -> bool:
    """Return whether a rule covers a host, as :func:`canonical` returns it, and port."""
    return any(each.allows(host, port) for each in rules)
