from __future__ import annotations

import ipaddress

import pytest

from rollart_core.errors import ConfigError
from rollart_sandboxes import network
from rollart_sandboxes.config import BubblewrapConfig
from rollart_sandboxes.isolation import describe
from rollart_sandboxes.isolation.config import Isolation


@pytest.mark.parametrize(
    ("rule", "host", "port", "allowed"),
    [
        ("pypi.org", "pypi.org", 443, True),
        ("pypi.org", "PyPI.org.", 80, True),
        ("pypi.org", "pypi.org", 8080, False),
        ("pypi.org", "www.pypi.org", 443, False),
        ("pypi.org", "notpypi.org", 443, False),
        ("pypi.org", "pypi.org.evil.test", 443, False),
        ("*.pypi.org", "www.pypi.org", 443, True),
        ("*.pypi.org", "a.b.pypi.org", 443, True),
        ("*.pypi.org", "pypi.org", 443, False),
        ("*.pypi.org", "evilpypi.org", 443, False),
        ("*.pypi.org:8443", "www.pypi.org", 8443, True),
        ("*.pypi.org:8443", "www.pypi.org", 443, False),
        ("bücher.example", "xn--bcher-kva.example", 443, True),
        ("127.0.0.1:9000", "127.0.0.1", 9000, True),
        ("127.0.0.1:9000", "127.0.0.2", 9000, False),
        ("[::1]:9000", "0:0:0:0:0:0:0:1", 9000, True),
    ],
)
def test_what_a_rule_allows(rule, host, port, allowed) -> None:
    assert network.allowed([network.rule(rule)], network.canonical(host), port) is allowed


@pytest.mark.parametrize("text", ["pypi.org", "*.pypi.org", "pypi.org:8443", "[fd00::1]:80"])
def test_a_rule_is_told_as_it_was_written(text) -> None:
    assert str(network.rule(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "*", "*.", "http://pypi.org", "pypi.org/simple", "pypi.org:", "pypi.org:0"),
        *("pypi.org:99999", "pypi.org:https", "a b", "*.*.org", "*.10.0.0.1", "a@b", "-a.org"),
        *("127.1", "2130706433", "0x7f.1", "0x7f000001", "[::1", "pypi..org", "a\n.org"),
    ],
)
def test_what_is_no_host_is_refused_in_a_config(text) -> None:
    with pytest.raises(ValueError, match="is not a host that can be allowed: write a name"):
        BubblewrapConfig(network=[text])


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        *((private, False) for private in ("127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1")),
        *(
            (special, False)
            for special in ("169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1")
        ),
        *((local, False) for local in ("::1", "::", "fe80::1", "fd00:ec2::254", "ff02::1")),
        *((hidden, False) for hidden in ("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1")),
        ("2002:7f00:1::", False),
        ("255.255.255.255", False),
    ],
)
def test_which_addresses_are_public(address, public) -> None:
    assert network.public(ipaddress.ip_address(address)) is public


def test_an_environment_that_needs_the_network_is_not_put_in_a_sandbox_that_has_none() -> None:
    said = {"spec": {"network": True}}
    with pytest.raises(ConfigError, match="a/B-v1 needs the network, and its sandbox has none"):
        describe._read("a/B-v1", said, Isolation(kind="bubblewrap"), {})
    named = Isolation.model_validate({"kind": "docker", "network": ["api.example.org"]})
    assert describe._read("a/B-v1", said, named, {}).spec.network
    assert describe._read("a/B-v1", said, Isolation(kind="venv", venv="x"), {}).spec.network
