"""Static checks of a package: manifest, entry points, imports, licence.

Takes: a target and the facts of its probes. Gives: checks that raise. Never: imports the package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import Distribution
from typing import Any, Final

import yaml
from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from rollart_core.errors import UserError, first_line
from rollart_core.plugins import api_version as plugin_api
from rollart_core.plugins.manager import GROUP
from rollart_core.plugins.manifest import MANIFEST_KINDS, MANIFEST_NAME, Manifest, parse_manifest
from rollart_testing.check.target import Target
from rollart_testing.results import CheckResult, SkipCheck, expect, run_check

MAX_IMPORT_S: Final = 0.3
"""Maximum CPU seconds to import hook modules, in addition to RollArt's own."""
HEAVY: Final = frozenset(
    """torch transformers tokenizers safetensors tensorflow jax flax ray docker datasets scipy
    pandas sklearn matplotlib spacy nltk aiohttp fastapi nicegui vllm sglang cv2 gymnasium trl
    openai anthropic textarena gem reasoning_gym skyrl_gym""".split()  # noqa: SIM905
)
"""Top-level packages that hook modules should not import."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts from probes of a package; see :mod:`rollart_testing.check.probe`."""

    cpu_s: float
    """The minimum over all probes."""
    loaded: Sequence[str]
    """Modules that were imported by the hook modules and their hooks."""
    errors: Mapping[str, str]
    """Hook module -> why it cannot be imported."""
    specs: Sequence[tuple[str, Mapping[str, Any]]]
    """(kind, spec) of all plugins that its hooks returned."""
    broken: Mapping[str, str]
    """Entry point -> why it is broken."""
    manifests: Mapping[str, str]
    """Import package -> text of its manifest."""


NO_FACTS: Final = Facts(0.0, (), {}, (), {}, {})
"""The facts of a target without hooks."""


def run_static_checks(target: Target, facts: Facts, names: Sequence[str]) -> list[CheckResult]:
    """Run the given static checks in order, with the checks that they depend on.

    Args:
        target: The target of the check.
        facts: The facts from probes.
        names: The checks to report.
    """
    results: list[CheckResult] = []
    for name, check in CHECKS.items():
        run = partial(check, target, facts)
        results.append(run_check(name, run, results, NEEDS.get(name, ())))
    return [result for result in results if result.name in names]


def check_contract_version(target: Target, facts: Facts) -> None:
    """Manifest and specs have a contract version that this RollArt supports."""
    _skip_without_plugin(target)
    versions = {spec["id"]: spec.get("contract_version") for _, spec in _plugin_specs(facts)}
    versions |= {_where(package): _version(text) for package, text in facts.manifests.items()}
    if not versions:
        raise SkipCheck("it has neither a manifest nor specs with a contract version")
    for who, version in versions.items():
        fault = plugin_api.version_fault(version) if isinstance(version, int) else None
        expect(fault is None, f"{who} has {fault}")


def check_manifest(target: Target, facts: Facts) -> None:
    """Its package holds a ``rollart.yaml`` that can be read."""
    _skip_without_plugin(target)
    _manifests(target, facts)


def check_manifest_agrees(target: Target, facts: Facts) -> None:
    """The manifest lists exactly the specs that the hooks return."""
    _skip_without_plugin(target)
    manifests = _manifests(target, facts)
    kinds = set(MANIFEST_KINDS)
    if target.is_core:  # internal plugins, such as trackers, are only in code
        kinds = {kind for manifest in manifests.values() for kind in manifest.specs}
    listed = {
        (kind, spec.id): _values(asdict(plugin_api.as_today(spec)))
        for manifest in manifests.values()
        for kind, specs in manifest.specs.items()
        for spec in specs
    }
    returned = {
        (kind, spec["id"]): _values(spec) for kind, spec in _plugin_specs(facts) if kind in kinds
    }
    for kind, spec_id in sorted(set(listed) ^ set(returned)):
        side = MANIFEST_NAME if (kind, spec_id) in listed else "a hook"
        expect(False, f"{spec_id} is only in {side} (among {kind})")
    for key, values in listed.items():
        differing = [name for name in values if values[name] != returned[key].get(name)]
        expect(
            not differing,
            f"{key[1]}: {', '.join(differing)} differ between {MANIFEST_NAME} and the hook",
        )


def check_entry_point(target: Target, facts: Facts) -> None:
    """It has an entry point in group ``rollart`` that loads."""
    expect(
        target.entry_points,
        f"it has no entry point in group {GROUP!r}: add a module of hooks to  "
        f"[project.entry-points.{GROUP}]",
    )
    for module, error in facts.errors.items():
        expect(False, f"cannot import {module}: {first_line(error)}")
    for name, reason in facts.broken.items():
        expect(False, f"{name} is broken: {first_line(reason)}")
    expect(facts.specs, "its hooks return nothing")


def check_pins(target: Target, facts: Facts) -> None:
    """Every dependency has a version specifier, and none is a direct URL."""
    wrong, bare, bound = [], set(), set()
    for line in _dist(target).requires or ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement as e:
            wrong.append(f"{line!r} cannot be read ({first_line(str(e))})")
            continue
        if requirement.url:
            wrong.append(f"{requirement.name} is a direct URL")
        elif not requirement.specifier:
            bare.add(canonicalize_name(requirement.name))
        elif "extra" not in str(requirement.marker):
            # The bound also covers extras, where rollart[train] may have no version.
            bound.add(canonicalize_name(requirement.name))
    wrong += [f"{n} has no version, such as {n}>=1.2" for n in sorted(bare - bound)]
    expect(not wrong, "; ".join(wrong))


def check_lazy_import(target: Target, facts: Facts) -> None:
    """Its hook modules import neither their plugins' classes nor heavy libraries."""
    _skip_without_plugin(target)
    loaded = set(facts.loaded)
    classes = {str(spec["entry_point"]).partition(":")[0] for _, spec in facts.specs}
    eager = sorted(classes & loaded)
    expect(not eager, f"importing the hooks imports {', '.join(eager)}; use lazy references")
    heavy = sorted({module.partition(".")[0] for module in loaded} & HEAVY)
    expect(not heavy, f"importing the hooks imports {', '.join(heavy)}")


def check_import_time(target: Target, facts: Facts) -> str:
    """Its hook modules import quickly."""
    _skip_without_plugin(target)
    took = f"{facts.cpu_s:.2f} s of CPU"
    expect(facts.cpu_s <= MAX_IMPORT_S, f"importing the hooks takes {took}, over {MAX_IMPORT_S} s")
    return took


def check_licence(target: Target, facts: Facts) -> str:
    """Manifest and metadata name the same SPDX licence, and its text is in the distribution."""
    dist = _dist(target)
    said = _metadata_licence(dist)
    expect(said, "its metadata has no licence: set project.license to an SPDX expression")
    licence = _spdx(said, "the metadata")
    for package, manifest in _read(facts).items():
        stated = _spdx(manifest.licence, _where(package))
        expect(licence == stated, f"the metadata says {licence}, {_where(package)} {stated}")
    expect(_has_licence_file(dist), "no LICENSE file is in the distribution")
    return licence


Check = Callable[[Target, Facts], str | None]
CHECKS: Final[Mapping[str, Check]] = {
    "contract_version": check_contract_version,
    "manifest": check_manifest,
    "entry_point": check_entry_point,
    "manifest_agrees": check_manifest_agrees,
    "pins": check_pins,
    "lazy_import": check_lazy_import,
    "import_time": check_import_time,
    "licence": check_licence,
}
NEEDS: Final[Mapping[str, Sequence[str]]] = {
    "manifest": ("contract_version",),
    "entry_point": ("contract_version", "manifest"),
    "manifest_agrees": ("contract_version", "manifest", "entry_point"),
    "lazy_import": ("entry_point",),
    "import_time": ("entry_point",),
    "licence": ("contract_version", "manifest"),
}


def _skip_without_plugin(target: Target) -> None:
    if not target.entry_points:
        raise SkipCheck(f"it has no entry point in group {GROUP!r}")


def _plugin_specs(facts: Facts) -> list[tuple[str, Mapping[str, Any]]]:
    return [(kind, spec) for kind, spec in facts.specs if "id" in spec]


def _manifests(target: Target, facts: Facts) -> dict[str, Manifest]:
    if not facts.manifests and target.is_core:
        raise SkipCheck("a part of RollArt itself, whose specs are only in code")
    packages = {value.partition(":")[0].partition(".")[0] for _, value in target.entry_points}
    expect(facts.manifests, f"no {MANIFEST_NAME} in package {' or '.join(sorted(packages))}")
    return _read(facts)


def _read(facts: Facts) -> dict[str, Manifest]:
    """Return the manifests.

    Raises:
        CheckFailed: If one has faults.
    """
    manifests = {}
    for package, text in facts.manifests.items():
        try:
            manifests[package] = parse_manifest(text, _where(package))
        except UserError as e:
            expect(False, "; ".join(str(e).splitlines()[:5]))
    return manifests


def _where(package: str) -> str:
    return f"{package.replace('.', '/')}/{MANIFEST_NAME}"


def _version(text: str) -> object:
    try:
        loaded = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    return loaded.get("contract_version") if isinstance(loaded, dict) else None


def _values(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a spec as JSON data: tuples are lists, 1.0 is 1."""
    return {name: _value(value) for name, value in spec.items()}


def _value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _values(value)
    return [_value(v) for v in value] if isinstance(value, list | tuple) else value


def _dist(target: Target) -> Distribution:
    if target.dist is None:
        raise SkipCheck("no distribution provides it: its module is in ROLLART_PLUGINS")
    return target.dist


def _metadata_licence(dist: Distribution) -> str:
    fields = ("License-Expression", "License")
    said = [text for name in fields for text in dist.metadata.get_all(name) or [] if text]
    return str(said[0]) if said else ""


def _spdx(expression: str, who: str) -> str:
    try:
        return str(canonicalize_license_expression(expression))
    except InvalidLicenseExpression:
        expect(False, f"{who} has {first_line(expression, 60)!r}, not an SPDX expression")
        raise


def _has_licence_file(dist: Distribution) -> bool:
    """Return whether the metadata's folder has a licence file, at any place of known builders."""
    named = dist.metadata.get_all("License-File") or []
    texts = [dist.read_text(f"{folder}{name}") for name in named for folder in ("licenses/", "")]
    files = [str(path).upper() for path in dist.files or ()]
    inside = [name for name in files if name.rpartition("/")[2].startswith(("LICEN", "COPYING"))]
    return any(texts) or bool(inside)
