"""The adapter of OpenEnv: a client of a running server, with one WebSocket session per environment.

The option ``base_url`` gives the server, or the id itself does (``openenv::http://host:8000``); any
other id is only a name. The text of the policy becomes one field of the server's action. The policy
reads one field of the server's observation, or a template over several. Without options, both
fields are determined from the JSON schemas that the server publishes.

A :class:`Mapper` converts between text and the server's JSON.

Takes: a URL and options. Gives: environments whose ``areset`` and ``astep`` need no thread.
Never: starts a server, or imports OpenEnv.
"""

from __future__ import annotations

import json
import math
import os
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any, ClassVar

import gymnasium
from pydantic import Field, field_validator

from rollart_core.config.base import Seconds
from rollart_core.contracts.adapter import EnvAdapter
from rollart_core.contracts.env import EnvSpec, TextEnv, Timeouts
from rollart_core.errors import EnvironmentFailure, PluginError, did_you_mean
from rollart_core.spaces import Text
from rollart_core.types import Observation
from rollart_plugins.adapters.base import DEFAULT_SPLITS, UNKNOWN_RANGE, AdapterOptions
from rollart_plugins.adapters.openenv_client import Client, InvalidAction, Server, fetch

NUM_PAGES = 20
"""Number of tasks whose first observation is used for a corpus."""
_Step = tuple[Observation, float, bool, bool, dict[str, Any]]

_OWN_FIELDS = frozenset({"metadata", "done", "reward"})
"""Fields that OpenEnv's base classes add to every action and observation."""


class OpenEnvOptions(AdapterOptions):
    """Options of ``openenv::NAME``."""

    base_url: str | None = None
    """URL of the server, such as `http://127.0.0.1:8000`. If not set, the id is the URL."""
    action_field: str | None = None
    """Field of the server's action that receives the text of the policy, converted to the type in
    the schema. If not set, the only field that the schema requires."""
    action: dict[str, Any] = Field(default_factory=dict)
    """Additional fields of every action, unchanged."""
    action_json: bool = False
    """Whether the text of the policy is the whole action, as a JSON object."""
    observation: str | None = None
    """Field of the server's observation that the policy reads (`a.b` for a nested one), or a
    template such as `{board} ({moves} moves left)`. If not set, the only text field if there is
    exactly one, otherwise the whole observation as JSON."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Additional arguments of the server's reset."""
    token_env: str | None = None
    """Environment variable that holds the bearer token of the server."""
    connect_s: Seconds = 10.0
    """Maximum time for a connection."""
    message_s: Seconds = 60.0
    """Maximum time for the response to one reset or step."""
    deterministic: bool = False
    """Whether the server returns the same episode for the same seed and actions."""
    errors_end: bool = True
    """Whether an exception in the server's own code fails the episode, which a run then retries.
    false: the policy reads the exception as an observation, like the message about an invalid
    action."""

    @field_validator("python")
    @classmethod
    def _elsewhere(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError("OpenEnv runs in its own server: set base_url instead")
        return value

    @field_validator("base_url")
    @classmethod
    def _http(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError(f"{value!r} does not begin with http:// or https://")
        return None if value is None else value.rstrip("/")


class OpenEnvAdapter(EnvAdapter):
    """Environments behind OpenEnv's WebSocket protocol."""

    package: ClassVar[str] = "aiohttp"

    def make(self, env_id: str, options: Mapping[str, object]) -> TextEnv:
        """Make a client. The session starts at the first reset.

        Raises:
            UserError: If the server is not reachable, or an option does not fit its schemas.
        """
        chosen = OpenEnvOptions(**options)
        server = _server(env_id, chosen)
        mapper = new_mapper(_schemas(server), chosen.model_dump())
        return OpenEnvEnv(server, mapper, chosen)

    def spec(self, env_id: str, options: Mapping[str, object]) -> EnvSpec:
        """Return the spec, from the server's metadata and the options.

        Raises:
            UserError: As for :meth:`make`.
        """
        chosen = OpenEnvOptions(**options)
        server = _server(env_id, chosen)
        new_mapper(_schemas(server), chosen.model_dump())
        said = fetch(server, "/metadata", missing={})
        scale = chosen.reward_scale
        return EnvSpec(
            id=env_id,
            entry_point=f"{__name__}:OpenEnvAdapter",
            summary=str(said.get("description") or said.get("name") or ""),
            splits=tuple(chosen.splits or DEFAULT_SPLITS),
            disjoint_splits=False,  # other seeds, but possibly the same tasks
            reward_range=chosen.reward_range
            or (UNKNOWN_RANGE[0] * scale, UNKNOWN_RANGE[1] * scale),
            deterministic=chosen.deterministic,
            max_turns=chosen.max_turns or 10,
            timeouts=Timeouts(chosen.connect_s + chosen.message_s, chosen.message_s),
            network=True,
        )


class OpenEnvEnv(gymnasium.Env[Observation, str]):
    """One session of a server."""

    def __init__(self, server: Server, mapper: Mapper, chosen: OpenEnvOptions) -> None:
        self.observation_space: Any = Text()
        self.action_space = Text()
        self._client = Client(server)
        self._mapper, self._chosen = mapper, chosen
        most = chosen.num_tasks or float("inf")
        ranges = chosen.splits or DEFAULT_SPLITS
        self._splits = {n: (a, int(min(b, a + most))) for n, (a, b) in ranges.items()}
        self._turn, self._over = 0, True

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks (seeds) in a split."""
        first, end = self._range(split)
        return end - first

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin the task of ``options`` (``task``, ``split``), or a task drawn with ``seed``."""
        return self._began(self._client.call(*self._reset_message(seed, options)))

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin a task asynchronously, without a thread."""
        return self._began(await self._client.acall(*self._reset_message(seed, options)))

    def step(self, action: str) -> _Step:
        """Execute one action."""
        try:
            return self._stepped(self._client.call("step", self._payload(action)))
        except InvalidAction as e:
            return self._refused(e)

    async def astep(self, action: str) -> _Step:
        """Execute one action asynchronously, without a thread."""
        try:
            return self._stepped(await self._client.acall("step", self._payload(action)))
        except InvalidAction as e:
            return self._refused(e)

    def corpus(self) -> Iterator[str]:
        """Yield first observations and all printable characters, to build a tokenizer."""
        yield string.printable
        for index in range(min(NUM_PAGES, self.num_tasks(next(iter(self._splits))))):
            yield str(self.reset(options={"task": index})[0])

    def close(self) -> None:
        """End the session."""
        self._over = True
        self._client.close()

    def _range(self, split: str) -> tuple[int, int]:
        if split not in self._splits:
            raise ValueError(f"no split {split!r}; available splits: {', '.join(self._splits)}")
        return self._splits[split]

    def _reset_message(
        self, seed: int | None, options: dict[str, Any] | None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        options = options or {}
        first, end = self._range(str(options.get("split") or next(iter(self._splits))))
        index = options.get("task")
        if index is None:
            index = int(self.np_random.integers(end - first))
        if not 0 <= index < end - first:
            raise ValueError(f"task {index} is not in the split: 0 to {end - first - 1}")
        self._over = True
        return "reset", {**self._chosen.reset, "seed": first + index}

    def _began(self, answer: Mapping[str, Any]) -> tuple[Observation, dict[str, Any]]:
        if answer.get("done"):
            raise EnvironmentFailure("the server's reset returned an episode that is already over")
        self._turn, self._over = 0, False
        text = self._mapper.observation(answer)
        prompt = self._chosen.prompt or ""
        if "{observation}" in prompt:
            return prompt.replace("{observation}", text), {}
        return f"{prompt}\n\n{text}" if prompt else text, {}

    def _payload(self, action: str) -> dict[str, Any]:
        if self._over:
            raise RuntimeError("the episode is over: call reset() first")
        return self._mapper.action(action)

    def _stepped(self, answer: Mapping[str, Any]) -> _Step:
        reward = float(answer.get("reward") or 0.0) * self._chosen.reward_scale
        done = bool(answer.get("done"))
        text = self._mapper.observation(answer)
        return (text, reward, *self._ends(done), {"metadata": answer.get("metadata") or {}})

    def _refused(self, error: InvalidAction) -> _Step:
        if error.raised and self._chosen.errors_end:
            raise EnvironmentFailure(f"the server's step: {error}") from error
        return (str(error), 0.0, *self._ends(False), {"invalid_action": True})

    def _ends(self, done: bool) -> tuple[bool, bool]:
        self._turn += 1
        most = self._chosen.max_turns
        truncated = not done and most is not None and self._turn >= most
        self._over = done or truncated
        return done, truncated


def _server(env_id: str, chosen: OpenEnvOptions) -> Server:
    is_url = env_id.startswith(("http://", "https://"))
    url = chosen.base_url or (env_id.rstrip("/") if is_url else None)
    if url is None:
        raise PluginError(
            f"openenv::{env_id} has no server address: set base_url (http://127.0.0.1:8000), or "
            "use the URL as the id: openenv::http://127.0.0.1:8000"
        )
    headers: dict[str, str] = {}
    if chosen.token_env is not None:
        token = os.environ.get(chosen.token_env)
        if not token:
            raise PluginError(f"token_env: the environment variable {chosen.token_env} is not set")
        headers["Authorization"] = f"Bearer {token}"
    return Server(url, headers, chosen.connect_s, chosen.message_s)


def _schemas(server: Server) -> Mapping[str, Any]:
    said = fetch(server, "/schema")
    if not isinstance(said, Mapping) or "action" not in said:
        raise PluginError(
            f"{server.url} is not an OpenEnv server: it has no /schema with an action"
        )
    return said


@dataclass(frozen=True, slots=True)
class Mapper:
    """Conversion between text and the JSON of one environment."""

    action_field: str | None
    """Field of the action that receives the text. None: the text is a JSON object."""
    action_kind: str
    fixed: Mapping[str, Any]
    """Additional fields of every action."""
    field: str | None
    """Path of the observation's field. None if there is a template, or if the whole observation is
    shown."""
    template: str | None

    def action(self, text: str) -> dict[str, Any]:
        """Return the action for ``text``.

        Raises:
            InvalidAction: If the text is not a valid action. The policy reads the message.
        """
        if self.action_field is None:
            return {**_json_object(text), **self.fixed}
        return {**self.fixed, self.action_field: _converted(text, self.action_kind)}

    def observation(self, answer: Mapping[str, Any]) -> str:
        """Return the text of an answer for the policy.

        Raises:
            ValueError: If the answer lacks a field that the options name.
        """
        seen = answer.get("observation") or {}
        if self.template is not None:
            try:
                return self.template.format_map(seen)
            except (KeyError, AttributeError, IndexError, ValueError) as e:
                raise ValueError(f"the template does not fit the observation {seen!r}: {e}") from e
        if self.field is not None:
            return _text(_at(seen, self.field))
        return _text({k: v for k, v in seen.items() if k not in _OWN_FIELDS})


def new_mapper(schemas: Mapping[str, Any], options: Mapping[str, Any]) -> Mapper:
    """Return the mapper for these options and schemas.

    Raises:
        PluginError: If the options are ambiguous, or name a field that the schema does not have.
    """
    field, kind = _action_field(schemas["action"], options)
    wanted: str | None = options["observation"]
    if wanted is not None and "{" in wanted:
        names = [name for _, name, _, _ in Formatter().parse(wanted) if name]
        for name in names:
            _refuse_unknown(schemas, name.split(".")[0].split("[")[0], "observation")
        return Mapper(field, kind, options["action"], None, wanted)
    if wanted is not None:
        _refuse_unknown(schemas, wanted.split(".")[0], "observation")
    path = wanted or _only_text(schemas.get("observation") or {})
    return Mapper(field, kind, options["action"], path, None)


def _action_field(schema: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[str | None, str]:
    known = _fields(schema)
    fixed: Mapping[str, Any] = options["action"]
    for name in fixed:
        _refuse_unknown({"action": schema}, name, "action")
    wanted: str | None = options["action_field"]
    if options["action_json"]:
        if wanted is not None:
            raise PluginError("action_field has no effect with action_json: remove one of them")
        return None, "object"
    if wanted is not None:
        _refuse_unknown({"action": schema}, wanted, "action_field")
        return wanted, _kind(known.get(wanted, {}))
    open_fields = [n for n in schema.get("required") or known if n in known and n not in fixed]
    if len(open_fields) != 1:
        raise PluginError(
            f"the server's action has the fields {', '.join(known) or 'none'}: set action_field "
            "to the one that receives the text (use action for fixed values of others, or "
            "action_json for the whole action)"
        )
    return open_fields[0], _kind(known[open_fields[0]])


def _fields(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {n: s for n, s in (schema.get("properties") or {}).items() if n not in _OWN_FIELDS}


def _refuse_unknown(schemas: Mapping[str, Any], name: str, option: str) -> None:
    schema = schemas.get("action" if option.startswith("action") else "observation") or {}
    hidden = ("done", "reward")  # the server sends them next to the observation, not in it
    known = [name for name in schema.get("properties") or () if name not in hidden]
    if known and name not in known and not schema.get("additionalProperties"):
        near = did_you_mean(name, known)
        raise PluginError(f"{option}: the server has no field {name!r}.{near} It has: {known}")


def _kind(schema: Mapping[str, Any]) -> str:
    kinds = [s.get("type") for s in (schema, *(schema.get("anyOf") or ()))]
    return next((str(kind) for kind in kinds if kind and kind != "null"), "string")


def _only_text(schema: Mapping[str, Any]) -> str | None:
    texts = [name for name, said in _fields(schema).items() if _kind(said) == "string"]
    return texts[0] if len(texts) == 1 else None


def _converted(text: str, kind: str) -> Any:
    try:
        if kind == "integer":
            return int(text)
        if kind == "number" and math.isfinite(float(text)):
            return float(text)
        if kind == "boolean":
            return {"true": True, "false": False}[text.strip().lower()]
        if kind in ("array", "object"):
            return json.loads(text)
        if kind == "string":
            return text
    except (ValueError, KeyError):
        pass
    raise InvalidAction(f"Invalid action: {text[:100]!r} is no {kind}.")


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as e:
        raise InvalidAction(f"Invalid action: it is not JSON ({e}).") from e
    if not isinstance(found, dict):
        raise InvalidAction("Invalid action: it is not a JSON object.")
    return found


def _at(value: Any, path: str) -> Any:
    for part in path.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, TypeError, ValueError) as e:
            raise ValueError(f"the observation has no {path!r}") from e
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
