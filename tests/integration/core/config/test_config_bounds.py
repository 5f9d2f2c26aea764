"""Every number of a config has its range, and what is outside of it is refused by its key."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from rollart_core.config.load import load_config
from rollart_core.config.run import AsyncRun, SyncRun
from rollart_core.config.sandbox_options import PoolOptions
from rollart_core.errors import ConfigError
from rollart_core.plugins import registry
from rollart_core.plugins.manager import plugins
from rollart_evals.plan import Suite
from rollart_planner.cluster import Cluster
from rollart_sandboxes.isolation.config import Isolation

BASE = "env: frozenlake\nmodel: {kind: new}\nstop: {batches: 2}\n"
_LOW, _HIGH = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}


def plugin_models() -> Iterator[type[BaseModel]]:
    for kind in registry.SINGULAR:
        if kind == "commands":
            continue
        for plugin_id in plugins().registered(kind):
            model = registry.config_model(kind, plugin_id)
            if model is not None and model.__module__.startswith("rollart_"):
                yield model


MODELS = list(
    dict.fromkeys([SyncRun, AsyncRun, Suite, Cluster, PoolOptions, Isolation, *plugin_models()])
)


def unbounded(schema: object, path: tuple[object, ...] = ()) -> Iterator[str]:
    """Yield the places of a JSON schema where a number has not both limits."""
    if isinstance(schema, dict):
        is_number = schema.get("type") in ("integer", "number")
        is_fixed = {"const", "enum"} & set(schema)
        if is_number and not is_fixed and not (_LOW & set(schema) and _HIGH & set(schema)):
            yield ".".join(map(str, path))
        for key, value in schema.items():
            yield from unbounded(value, (*path, key))
    elif isinstance(schema, list):
        for i, value in enumerate(schema):
            yield from unbounded(value, (*path, i))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_number_has_both_limits(model: type[BaseModel]) -> None:
    assert list(unbounded(model.model_json_schema())) == []


def test_a_number_without_limits_is_found() -> None:
    class Loose(BaseModel):
        bad: dict[str, float | None]

    assert len(list(unbounded(Loose.model_json_schema()))) == 1


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e300, 10**400, -(10**400)])
def test_no_number_is_without_an_end(model: type[BaseModel], value: float) -> None:
    for name, field in model.model_fields.items():
        if not any({"gt", "ge", "lt", "le"} & set(dir(limit)) for limit in field.metadata):
            continue
        with pytest.raises(ValidationError) as raised:
            model.model_validate({name: value})
        assert any(name in error["loc"] for error in raised.value.errors()), name


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model.head_dim=3", "must be at least 2 and at most 4,096 and a multiple of 2"),
        ("model.num_kv_heads=3", "num_heads (2) must be a multiple of num_kv_heads (3)"),
        ("trainer.beta1=5", "must be at least 0 and below 1 (the default is 0.9), got 5"),
        ("trainer.eps=-1", "must be above 0 and at most 1"),
        ("trainer.lr=1e30", "must be above 0 and at most 1 (the default is 0.0003), got 1e+30"),
        ("trainer.weight_decay=.nan", "must be at least 0 and at most 1"),
        ("rollout.temperature=.inf", "must be above 0 and at most 100"),
        ("runtime.num_engines=1e30", "must be above 0 and at most 10,000 (the default is 1)"),
        ("stop.wall_s=.inf", "must be above 0 and at most 1,000,000,000, got inf"),
        ("shaping.clip=[.nan, 1]", "must be a finite number, got nan"),
        ("seed=-1", "must be at least 0"),
        (f"name={'x' * 300}", "is too long: a name has at most 100 characters"),
        ('name="a\\nb"', "cannot be a name"),
        (f"rollout.split={'x' * 300}", "is too long"),
        ("env.max_turns=1e30", "must be above 0 and at most 1,000,000,000"),
        ("env.hole_probability=.nan", "must be above 0 and below 0.6"),
        ("algorithm.kl_coef=.inf", "must be at least 0 and at most 1,000,000,000"),
        ("algorithm.staleness_discount=.nan", "must be above 0 and at most 1"),
        ("engine.max_sessions=1e30", "must be above 0 and at most 1,000,000,000"),
        ("reward={id: rollart/Numeric-v1, rel_tol: .inf}", "must be at least 0"),
    ],
)
def test_what_is_outside_is_named_with_its_range(tmp_path: Path, setting: str, said: str) -> None:
    from rollart_core.runtime.prepare import prepare

    path = tmp_path / "x.yaml"
    path.write_text(BASE)
    with pytest.raises(ConfigError) as raised:
        prepare(path, [setting], import_classes=False, makes_folder=False)
    assert said in str(raised.value)
    assert setting.split("=")[0].split(".")[-1] in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_least_and_the_greatest_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(BASE)
    settings = ["trainer.lr=1", "trainer.beta1=0", f"name={'x' * 100}", "model.head_dim=2"]
    assert load_config(path, settings).trainer.lr == 1
