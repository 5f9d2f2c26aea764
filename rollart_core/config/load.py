"""Load a YAML file with ``key=value`` overrides as a checked :class:`RunConfig`, and write it.

Takes: a path, overrides. Gives: a consistent RunConfig, or one ConfigError with a line for every
problem. Never: imports torch or a plugin's code (:mod:`rollart_core.config.resolve` does the
latter).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from rollart_core.config.base import PluginRef
from rollart_core.config.evaluation import SWITCHES
from rollart_core.config.problems import Problem, of_validation
from rollart_core.config.run import AsyncRun, RunConfig, SyncRun
from rollart_core.config.validation.consistency import consistency_problems, entries
from rollart_core.contracts.env import EnvSpec, RunDefaults
from rollart_core.errors import ConfigError, UserError, first_line
from rollart_core.plugins import registry
from rollart_core.suggestions import no_such_file

RECORD_KEY = "resolved_with"
"""Key that a run adds to its own ``config.yaml``: plugin versions. It is a record, not a
setting."""

MAX_BYTES = 2**20
"""Maximum number of bytes read from a config file, because files such as /dev/zero have no end."""
_MOST_VALUES = 100_000
_NOT_YAML = (
    *(yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError),
)
"""Exceptions that PyYAML raises for text that is not YAML, or for a tag that does not fit its
value."""

_MODES: dict[str, type[SyncRun] | type[AsyncRun]] = {"sync": SyncRun, "async": AsyncRun}
_ANYTHING: TypeAdapter[Any] = TypeAdapter(object, config=ConfigDict(ser_json_inf_nan="constants"))


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a run config.

    Args:
        path: A YAML file.
        overrides: ``key=value`` strings with dotted keys and YAML values, applied in order.

    Raises:
        ConfigError: With one line per problem: ``file: key: the problem and how to fix it``.
    """
    source = Path(path)
    mapping = read_run_config(source)
    overridden = [apply_override(mapping, override) for override in overrides]
    return load_mapping(mapping, source, overridden)


def load_mapping(
    mapping: Mapping[str, Any], source: Path, overridden: Sequence[tuple[str, ...]] = ()
) -> RunConfig:
    """Return the config for a mapping.

    Args:
        mapping: The mapping of the file, with overrides applied.
        source: The name of the config in errors.
        overridden: Paths of keys from the command line.

    Raises:
        ConfigError: As :func:`load_config`.
    """
    config, problems = validate(mapping)
    if config is None or problems:
        raise as_error(problems, source, overridden)
    return config


def as_error(
    problems: Sequence[Problem], source: str | Path, overridden: Sequence[tuple[str, ...]] = ()
) -> ConfigError:
    """Return one error with a line for each problem and the source of its key."""
    lines = [f"{_origin(p, source, overridden)}: {p.within()}" for p in dict.fromkeys(problems)]
    return ConfigError("\n".join(lines))


def validate(mapping: Mapping[str, Any]) -> tuple[RunConfig | None, list[Problem]]:
    """Return the config for a mapping, and all its problems.

    The config is None if the mapping does not match the schema.
    """
    mapping = {k: v for k, v in mapping.items() if k != RECORD_KEY}
    mode = mapping.get("mode", "async")
    if not isinstance(mode, str) or mode not in _MODES:
        return None, [Problem(("mode",), f"must be sync or async, got {mode!r}")]
    model = _MODES[mode]
    others = tuple(m for m in _MODES.values() if m is not model)
    try:
        config = model.model_validate(mapping)
    except ValidationError as e:
        return None, of_validation(e, model, others)
    config = _with_run_defaults(config)
    return config, consistency_problems(config)


def _with_run_defaults(config: RunConfig) -> RunConfig:
    """Return the config with the defaults of its environments' specs, where they are larger."""
    specs = list[EnvSpec]()
    for ref in entries(config) or (cast("PluginRef", config.env),):
        if ":" not in ref.id:  # else it has no spec
            with suppress(UserError):  # reported when it is resolved
                specs.append(cast("EnvSpec", registry.find("environments", ref.id).spec))
    sections = {"rollout": config.rollout, "deadlines": config.deadlines}
    for name, section in sections.items():
        free = {f.name for f in fields(RunDefaults)} & set(type(section).model_fields)
        free -= section.model_fields_set
        most = {k: max(getattr(s.run_defaults, k) for s in specs) for k in free if specs}
        larger = {k: v for k, v in most.items() if v > getattr(section, k)}
        sections[name] = section.model_copy(update=larger)
        sections[name].model_fields_set.difference_update(larger)  # they are still defaults
    return config.model_copy(update=sections)


def read_run_config(path: Path) -> dict[str, Any]:
    """Read the mapping of a run config.

    Raises:
        ConfigError: As :func:`read_yaml`, and for a suite, which `rollart eval` runs.
    """
    mapping = read_yaml(path)
    if is_suite(mapping):
        raise ConfigError(
            f"{path}: this is a suite of environments: run it with `rollart eval {path}`"
        )
    return mapping


def is_suite(mapping: Mapping[str, Any]) -> bool:
    """Return whether a file is a suite of environments and not a run config."""
    return "suite" in mapping


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping.

    Raises:
        ConfigError: If the file does not exist, is not YAML, or is not a mapping.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(
                f"{path}: is longer than the limit of {MAX_BYTES} bytes; give a YAML file"
            )
        text = content.decode()
    except FileNotFoundError as e:
        raise ConfigError(no_such_file(path)) from e
    except IsADirectoryError as e:
        raise ConfigError(f"{path}: is a folder; give a file") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: is not a text file (UTF-8); give a YAML file") from e
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {first_line(str(e))}") from e
    try:
        loaded = _parsed(text)
    except _NOT_YAML as e:
        raise ConfigError(f"{path}{_position(e)}: not YAML: {_yaml_reason(e)}") from e
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: must be a mapping of keys to values")
    return loaded


def dump_yaml(mapping: Mapping[str, Any]) -> str:
    """Return YAML that :func:`read_yaml` reads as the same mapping."""
    return yaml.dump(
        _ANYTHING.dump_python(dict(mapping), mode="json"),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
    )


def apply_override(mapping: dict[str, Any], override: str) -> tuple[str, ...]:
    """Set one ``key=value`` in ``mapping``, creating missing sections; return its path.

    Raises:
        ConfigError: If it is not ``key=value``, or its path goes through a value.
    """
    key, separator, text = override.partition("=")
    path = tuple(key.split("."))
    if not separator or not all(path):
        raise ConfigError(f"override {override!r}: must be key=value, such as trainer.lr=3e-4")
    try:
        value = _parsed(text)
    except _NOT_YAML as e:
        raise ConfigError(f"override {override!r}: not YAML: {_yaml_reason(e)}") from e
    holder: Any = mapping
    for part, after in pairwise(path):
        holder = _descend(holder, part, override, after)
    _set(holder, path[-1], value, override)
    return path


def _descend(holder: Any, part: str, override: str, after: str) -> Any:
    """Return the section at ``part``; create a missing one and expand a short form."""
    key: Any = _index(holder, part, override) if isinstance(holder, list) else part
    inner = holder[key] if isinstance(holder, list) else holder.get(key)
    if inner is None or (part == "guard" and inner in SWITCHES):
        inner = {}  # a key of a section that is on or off makes it a section
    elif isinstance(inner, str):
        # `env: webshop` is short for `env: {id: webshop}`. A runtime has a kind, a model a path.
        inner = {{"runtime": "kind", "model": "path"}.get(part, "id"): inner}
    elif not isinstance(inner, dict | list):
        raise ConfigError(f"override {override!r}: {part} is {inner!r} and has no key {after!r}")
    holder[key] = inner
    return inner


def _set(holder: Any, part: str, value: object, override: str) -> None:
    if isinstance(holder, list):
        holder[_index(holder, part, override)] = value
    else:
        holder[part] = value


def _index(holder: list[Any], part: str, override: str) -> int:
    if not part.isdecimal() or int(part) >= len(holder):
        raise ConfigError(f"override {override!r}: {part!r} must be 0 to {len(holder) - 1}")
    return int(part)


def _origin(problem: Problem, source: str | Path, overridden: Sequence[tuple[str, ...]]) -> str:
    """Return the source of the key: the command line or the file."""
    path = tuple(map(str, problem.path))
    given = any(path[: len(key)] == key for key in overridden)
    return "command line" if given else str(source)


def _parsed(text: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        YAMLError: If it is not YAML, or if anchors make it larger than ``_MOST_VALUES``.
    """
    loaded = yaml.load(text, Loader=_Loader)
    waiting, count = [loaded], 0
    while waiting:
        value = waiting.pop()
        count += 1
        if count > _MOST_VALUES:
            raise yaml.YAMLError(f"more than {_MOST_VALUES} values, including those of anchors")
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list | tuple | set):
            waiting += value
    return loaded


def _position(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return f":{mark.line + 1}:{mark.column + 1}" if mark else ""


def _yaml_reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return str(getattr(error, "problem", None) or first_line(str(error)))


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars (``off`` is a string, ``3e-4`` a number) and unique keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                problem = f"key {key!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.append(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """The dumper that matches :class:`_Loader`."""


_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][-+]?[0-9]+)|[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+)$")


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Return YAML 1.2's implicit types by first character; null and merge as in PyYAML."""
    ours = {"tag:yaml.org,2002:bool", "tag:yaml.org,2002:float", "tag:yaml.org,2002:int"}
    dropped = {*ours, "tag:yaml.org,2002:timestamp"}
    table = {
        first: [(tag, pattern) for tag, pattern in entries if tag not in dropped]
        for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for tag, pattern, firsts in (
        ("tag:yaml.org,2002:bool", _BOOL, "tTfF"),
        ("tag:yaml.org,2002:float", _FLOAT, "-+0123456789."),
        ("tag:yaml.org,2002:int", _INT, "-+0123456789"),
    ):
        for first in firsts:
            table.setdefault(first, []).append((tag, pattern))
    return table


_Loader.yaml_implicit_resolvers = _resolvers()
_Dumper.yaml_implicit_resolvers = _resolvers()
