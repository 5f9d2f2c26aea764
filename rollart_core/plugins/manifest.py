"""The manifest ``rollart.yaml`` of a package: the definition of its specs.

Takes: the text, an importable package that contains it, or a wheel. Gives: :class:`Manifest`. A
hook module returns its specs: ``return specs(__package__, "environments")``. Never: imports the
classes of the specs, or anything from a wheel.
"""

from __future__ import annotations

import re
import reprlib
import types
import typing
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, cast

import yaml

from rollart_core.contracts.spec import ID_PATTERN, PLUGIN_API, PluginSpec
from rollart_core.errors import PluginError, UserError, did_you_mean, first_line
from rollart_core.plugins import api_version as plugin_api
from rollart_core.plugins.manager import KINDS

MANIFEST_NAME: Final = "rollart.yaml"

MANIFEST_KINDS: Final = tuple(kind for kind in KINDS if kind != "commands")
"""The kinds that a manifest may list. Commands are registered only by their hook."""

_HEAD: Final = ("contract_version", "licence")
_MAX_BYTES: Final = 256 * 1024
_PATH: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_FORMS: Final[Mapping[str, tuple[re.Pattern[str], str]]] = {
    "id": (ID_PATTERN, "'namespace/Name-vN'"),
    "entry_point": (_PATH, "'module:Class'"),
    "config": (_PATH, "'module:Model'"),
}


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a manifest."""

    contract_version: int
    licence: str
    """Licence as an SPDX expression."""
    specs: Mapping[str, tuple[PluginSpec, ...]]
    """Kind, such as ``environments``, -> its specs. Contains only the listed kinds."""


def parse_manifest(text: str, source: str) -> Manifest:
    """Read a manifest.

    Args:
        text: YAML.
        source: Origin of the text, for messages.

    Raises:
        PluginError: With one line per fault.
    """
    loaded = _load(text, source)
    version = loaded.get("contract_version")
    if type(version) is int and version > 0:  # before its unknown keys
        fault = plugin_api.version_fault(version)
        if fault:
            raise PluginError(f"{source}: {fault}")
    reading = _Reading(source)
    manifest = reading.manifest(loaded)
    if manifest is None or reading.faults:
        raise PluginError("\n".join(reading.faults))
    return manifest


def read_manifest(package: str) -> Manifest:
    """Return the manifest of an importable package. This imports the package.

    Raises:
        PluginError: If the package has no manifest, or the manifest has faults.
    """
    try:
        text = files(package).joinpath(MANIFEST_NAME).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PluginError(
            f"package {package!r} has no {MANIFEST_NAME}: put one next to its __init__.py, and "
            f'name it in [tool.setuptools.package-data]: {package} = ["{MANIFEST_NAME}"]'
        ) from None
    except (ImportError, OSError, UnicodeDecodeError) as e:
        reason = f"{type(e).__name__}: {first_line(str(e))}"
        raise PluginError(f"the {MANIFEST_NAME} of {package!r} cannot be read: {reason}") from e
    return _parsed(text, f"{package.replace('.', '/')}/{MANIFEST_NAME}")


def read_wheel_manifests(wheel: Path) -> dict[str, Manifest]:
    """Return the manifests in a wheel, by import package. Nothing is unpacked or imported.

    Raises:
        UserError: If the file is not a wheel, or a manifest in it has faults.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.endswith(f"/{MANIFEST_NAME}")]
            texts = {name: _member(archive, name, wheel) for name in names}
    except FileNotFoundError:
        raise UserError(f"{wheel}: there is no such file") from None
    except (OSError, RuntimeError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as e:
        raise UserError(f"{wheel}: cannot be read as a wheel: {first_line(str(e))}") from e
    return {
        name.rpartition("/")[0].replace("/", "."): parse_manifest(text, f"{wheel.name}: {name}")
        for name, text in sorted(texts.items())
    }


def specs(package: str, kind: str) -> list[Any]:
    """Return the specs of one kind, for a hook module: ``specs(__package__, "environments")``.

    Raises:
        PluginError: As :func:`read_manifest`, or if there is no such kind.
    """
    if kind not in MANIFEST_KINDS:
        near = did_you_mean(kind, MANIFEST_KINDS)
        raise PluginError(f"{kind!r} is not a kind in a manifest.{near} {_known(MANIFEST_KINDS)}")
    return list(read_manifest(package).specs.get(kind, ()))


_parsed = lru_cache(maxsize=64)(parse_manifest)
"""A hook module reads the manifest once per kind that it registers. The text is part of the cache
key."""


def _member(archive: zipfile.ZipFile, name: str, wheel: Path) -> str:
    if archive.getinfo(name).file_size > _MAX_BYTES:
        raise UserError(f"{wheel.name}: {name} is larger than {_MAX_BYTES} bytes")
    return archive.read(name).decode("utf-8")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The C parser if PyYAML has it. Rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                problem = f"key {key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(str(key.value))
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made


def _load(text: str, source: str) -> dict[Any, Any]:
    if len(text) > _MAX_BYTES:
        raise PluginError(f"{source}: larger than {_MAX_BYTES} bytes")
    try:
        loaded = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        mark = getattr(e, "problem_mark", None)
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        reason = getattr(e, "problem", None) or first_line(str(e)) or type(e).__name__
        raise PluginError(f"{source}{where}: not YAML: {reason}") from e
    if not isinstance(loaded, dict):
        raise PluginError(f"{source}: must be a mapping of keys to values")
    return loaded


@dataclass(slots=True)
class _Reading:
    """One manifest during reading. It collects all faults and continues after each."""

    source: str
    faults: list[str] = field(default_factory=list)

    def fault(self, path: str, reason: str) -> None:
        self.faults.append(
            f"{self.source}: {path}: {reason}" if path else f"{self.source}: {reason}"
        )

    def manifest(self, loaded: dict[Any, Any]) -> Manifest | None:
        self.unknown_keys("", loaded, (*_HEAD, *MANIFEST_KINDS))
        version, licence = loaded.get("contract_version"), loaded.get("licence")
        if type(version) is not int or version < 1:
            self.fault("contract_version", f"must be {PLUGIN_API}, got {reprlib.repr(version)}")
        if not isinstance(licence, str) or not licence.strip():
            self.fault("licence", "must be an SPDX expression, such as Apache-2.0")
        given = {kind: loaded[kind] for kind in MANIFEST_KINDS if kind in loaded}
        if not given:
            self.fault("", f"it lists nothing. {_known(MANIFEST_KINDS)}")
        defaults = {"contract_version": version, "licence": licence}
        specs = {kind: self.entries(kind, entries, defaults) for kind, entries in given.items()}
        if self.faults:
            return None
        return Manifest(cast("int", version), cast("str", licence), types.MappingProxyType(specs))

    def entries(
        self, kind: str, entries: object, defaults: Mapping[str, object]
    ) -> tuple[PluginSpec, ...]:
        if not isinstance(entries, list):
            self.fault(kind, f"must be a list of mappings, got {reprlib.repr(entries)}")
            return ()
        spec_class = KINDS[kind]
        known = {f.name for f in fields(spec_class)}
        filled = {name: value for name, value in defaults.items() if name in known}
        made = []
        for index, entry in enumerate(entries):
            path = f"{kind}[{index}]"
            merged = {**filled, **entry} if isinstance(entry, dict) else entry
            made.append(self.record(spec_class, merged, path))
            self.check_forms(path, merged)
        found = [cast("PluginSpec", spec) for spec in made if spec is not None]
        for spec_id, count in Counter(spec.id for spec in found).items():
            if count > 1:
                self.fault(kind, f"id {spec_id!r} is given {count} times")
        return tuple(found)

    def check_forms(self, path: str, entry: object) -> None:
        for name, (pattern, form) in _FORMS.items():
            value = entry.get(name) if isinstance(entry, dict) else None
            if isinstance(value, str) and not pattern.fullmatch(value):
                self.fault(f"{path}.{name}", f"must be of the form {form}, got {value!r}")

    def record(self, record: type[Any], given: object, path: str) -> Any:
        """Return ``record(**given)`` with converted values. None if there is a fault."""
        if not isinstance(given, dict):
            self.fault(path, f"must be a mapping, got {reprlib.repr(given)}")
            return None
        before = len(self.faults)
        readers, required = _shape(cast("Any", record))
        self.unknown_keys(path, given, tuple(readers))
        for name in required:
            if name not in given:
                self.fault(f"{path}.{name}", "is missing")
        values = {
            name: read(self, given[name], f"{path}.{name}")
            for name, read in readers.items()
            if name in given
        }
        return None if len(self.faults) > before else record(**values)

    def unknown_keys(self, path: str, given: Mapping[Any, Any], known: tuple[str, ...]) -> None:
        for key in given:
            if key not in known:
                near = did_you_mean(str(key), known) or f" {_known(known)}"
                self.fault(f"{path}.{key}" if path else str(key), f"unknown key.{near}")


_Reader = Callable[[_Reading, object, str], object]


@cache
def _shape(record: Any) -> tuple[dict[str, _Reader], tuple[str, ...]]:
    """Return the readers of a record's fields, from its annotations, and the required fields."""
    hints = typing.get_type_hints(record)
    readers = {f.name: _reader(hints[f.name]) for f in fields(record)}
    bare = [f for f in fields(record) if f.default is MISSING and f.default_factory is MISSING]
    return readers, tuple(f.name for f in bare)


def _reader(hint: Any) -> _Reader:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda reading, value, path: reading.record(hint, value, path)
    if origin is types.UnionType:  # X | None is the only union in a spec
        some = _reader(next(i for i in inner if i is not type(None)))
        return lambda reading, value, path: None if value is None else some(reading, value, path)
    if origin is typing.Literal:
        return _checked(lambda value: value in inner, f"one of {', '.join(inner)}")
    if origin is tuple:
        return _tuple_reader(inner)
    return _SCALARS[hint]


def _tuple_reader(inner: tuple[Any, ...]) -> _Reader:
    item, size = _reader(inner[0]), None if inner[-1] is Ellipsis else len(inner)

    def read(reading: _Reading, value: object, path: str) -> object:
        if not isinstance(value, list) or len(value) != (size or len(value)) or not value:
            wanted = f"a list of {size}" if size else "a list of at least one"
            reading.fault(path, f"must be {wanted}, got {reprlib.repr(value)}")
            return None
        return tuple(item(reading, v, f"{path}[{n}]") for n, v in enumerate(value))

    return read


def _checked(fits: Callable[[Any], bool], wanted: str) -> _Reader:
    def read(reading: _Reading, value: object, path: str) -> object:
        if not fits(value):
            reading.fault(path, f"must be {wanted}, got {reprlib.repr(value)}")
        return value

    return read


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(cast("float", value)) < float("inf")


_SCALARS: Final[Mapping[Any, _Reader]] = {
    str: _checked(lambda value: isinstance(value, str), "text"),
    bool: _checked(lambda value: isinstance(value, bool), "true or false"),
    int: _checked(lambda value: type(value) is int, "a whole number"),
    float: _checked(_is_number, "a number"),
}


def _known(names: tuple[str, ...]) -> str:
    return f"Known here: {', '.join(names)}"
