"""Images and Kubernetes manifests agree with the code, each other and KubeRay's schema."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement

from rollart_core.config.load import load_config

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "deploy/docker"
EXAMPLE = ROOT / "examples/gpu/qwen3_8b_webshop_16.yaml"
CRDS = os.environ.get("KUBERAY_CRDS")
"""The folder helm-chart/kuberay-operator/crds of a clone of KubeRay."""

TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}


def exactly(required: str = "", **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def many(of: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of, "minItems": 1}


QUANTITIES = {
    "type": "object",
    "additionalProperties": {"type": "string", "pattern": r"^\d+(Gi)?$"},
}
CONTAINER = exactly(
    "name image resources securityContext volumeMounts",
    name=TEXT,
    image={"type": "string", "pattern": r"^[a-z-]+:\d+\.\d+\.\d+$"},
    env=many(
        exactly(
            "name valueFrom",  # no values
            name=TEXT,
            valueFrom=exactly(
                "secretKeyRef", secretKeyRef=exactly("name key", name=TEXT, key=TEXT)
            ),
        )
    ),
    lifecycle=exactly(preStop=exactly("exec", exec=exactly("command", command=many(TEXT)))),
    resources=exactly("requests limits", requests=QUANTITIES, limits=QUANTITIES),
    securityContext=exactly(allowPrivilegeEscalation={"const": False}),
    volumeMounts=many(exactly("name mountPath", name=TEXT, mountPath=TEXT)),
)
POD = exactly(
    "containers volumes securityContext",
    terminationGracePeriodSeconds=COUNT,
    securityContext=exactly(runAsNonRoot={"const": True}, runAsUser=COUNT, fsGroup=COUNT),
    containers=many(CONTAINER),
    volumes=many(
        exactly(
            "name",
            name=TEXT,
            persistentVolumeClaim=exactly("claimName", claimName=TEXT),
            emptyDir=exactly("medium sizeLimit", medium={"const": "Memory"}, sizeLimit=TEXT),
            configMap=exactly("name", name=TEXT),
        )
    ),
)
PARAMS = {"type": "object", "additionalProperties": TEXT}
TEMPLATE = exactly("spec", spec=POD)
CLUSTER = exactly(
    "rayVersion authOptions headGroupSpec workerGroupSpecs",
    rayVersion=TEXT,
    authOptions=exactly("mode secretName", mode={"const": "token"}, secretName=TEXT),
    headGroupSpec=exactly("template", rayStartParams=PARAMS, template=TEMPLATE),
    workerGroupSpecs=many(
        exactly(
            "groupName minReplicas maxReplicas template",  # as KubeRay requires
            **{"groupName": TEXT, "replicas": COUNT, "minReplicas": COUNT, "maxReplicas": COUNT},
            rayStartParams=PARAMS,
            template=TEMPLATE,
        )
    ),
)
JOB = exactly(
    "entrypoint rayClusterSpec",
    entrypoint=TEXT,
    backoffLimit=COUNT,
    shutdownAfterJobFinishes={"type": "boolean"},
    rayClusterSpec=CLUSTER,
)
KINDS = {"raycluster": ("RayCluster", CLUSTER), "rayjob": ("RayJob", JOB)}


def manifest(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / f"deploy/kubernetes/{name}.yaml").read_text())
    return found


def strict(schema: Any) -> Any:
    """Return a schema of Kubernetes that refuses unknown fields, as ``kubectl apply`` does."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    if "properties" in found and not found.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_manifest_has_the_fields_of_kuberay(name: str) -> None:
    """The schema has the fields that we use, as in the resource definitions of KubeRay 1.7.0."""
    kind, spec = KINDS[name]
    head = {"apiVersion": {"const": "ray.io/v1"}, "kind": {"const": kind}}
    schema = exactly("spec", **head, metadata=exactly("name", name=TEXT), spec=spec)
    jsonschema.validate(manifest(name), schema)


@pytest.mark.skipif(CRDS is None, reason="set KUBERAY_CRDS to the folder of KubeRay's CRDs")
@pytest.mark.parametrize("name", KINDS)
def test_a_manifest_is_valid_by_kuberays_own_schema(name: str) -> None:
    assert CRDS is not None
    definition = yaml.load(
        (Path(CRDS) / f"ray.io_{name}s.yaml").read_text(),
        getattr(yaml, "CSafeLoader", yaml.SafeLoader),
    )
    (version,) = (v for v in definition["spec"]["versions"] if v["name"] == "v1")
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    jsonschema.Draft7Validator(schema).validate(manifest(name))


def test_the_job_has_the_cluster_and_a_run_that_can_start(tmp_path: Path) -> None:
    job = manifest("rayjob")["spec"]
    assert job["rayClusterSpec"] == manifest("raycluster")["spec"]
    (tmp_path / "models/Qwen3-8B").mkdir(parents=True)
    (tmp_path / "models/Qwen3-8B/config.json").write_text("{}")
    words = job["entrypoint"].replace("/shared", str(tmp_path)).split()
    program, command, config, resume, auto, *settings = words
    assert (program, command, resume, auto) == ("rollart", "run", "--resume", "auto")
    assert config == "/etc/rollart/run.yaml"
    run = load_config(EXAMPLE, settings)
    head = job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert [one["name"] for one in head["env"]] == list(getattr(run.runtime, "env_vars", ()))


def test_the_cluster_offers_what_the_example_asks_for() -> None:
    """Kinds and numbers are those of scripts/node.sh: a unit for each GPU, else for each core."""
    offered: dict[str, float] = {}
    for group in manifest("raycluster")["spec"]["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        gpus, cores = int(limits.get("nvidia.com/gpu", 0)), int(limits["cpu"])
        kinds = json.loads(json.loads(group["rayStartParams"]["resources"]))
        assert kinds == {group["groupName"]: gpus or cores}
        assert container["image"].startswith("rollart-gpu:" if gpus else "rollart-worker:")
        for kind, number in {**kinds, "GPU": gpus, "CPU": cores}.items():
            offered[kind] = offered.get(kind, 0) + group["replicas"] * number
    pools = getattr(load_config(EXAMPLE).runtime, "pools", ())
    assert pools
    for pool in pools:
        for kind, number in pool.resources.items():
            assert offered[kind] >= pool.count * number, pool.name


def pins() -> dict[str, str]:
    lines = (DOCKER / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_the_packages_of_the_images_are_pinned_to_versions_that_rollart_supports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for image in ("worker", "gpu"):
        text = (DOCKER / f"{image}.Dockerfile").read_text()
        used = set(re.findall(r"e\['(\w+)'\]", text)) | set(
            re.findall(r"'(\w+)'", "".join(re.findall(r"names = \(.*?\)", text)))
        )
        assert used >= {"ray", "gateway"}
        wanted = [*project["dependencies"], *(r for name in used for r in extras[name])]
        for one in map(Requirement, wanted):
            assert pins()[one.name.lower().replace("_", "-")] in one.specifier, one
    assert manifest("raycluster")["spec"]["rayVersion"] == pins()["ray"]


@pytest.mark.parametrize("image", ["worker", "gpu"])
def test_an_image_is_small_pinned_and_not_of_root(image: str) -> None:
    text = (DOCKER / f"{image}.Dockerfile").read_text()
    (base,) = re.findall(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
    assert re.search(r":\d+\.\d+", base)
    stages = text.split("\nFROM ")
    assert "USER 1000:1000" in stages[-1]
    assert "pip install" not in stages[-1]
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
    packages = {Path(p) for p in ("rollart_core", "plugins", "envs", "rewards", "algorithms")}
    assert all(re.search(rf"^COPY {p} {p}$", text, re.MULTILINE) for p in packages)
