"""Options of the reward backends, and checks for missing packages and keys. Never imports them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollart_core.config.base import MOST_BYTES, Bytes, Count, NonNegative, PositiveInt, Seconds

_MIB = 1 << 20
LAMBDA_BYTES = 6 * _MIB
"""The maximum size of the request and the response of a synchronous call of AWS Lambda."""

NO_AIOHTTP = "the http backend needs aiohttp: pip install 'rollart[serverless]'"
NO_BOTO3 = "the lambda backend needs boto3: pip install 'rollart[lambda]'"
NO_FC = "the fc backend needs Function Compute's SDK: pip install 'rollart[fc]'"
NO_RAY_SERVE = "the ray_serve backend needs Ray Serve: pip install 'rollart[ray-serve]'"

Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
WORKER: Final = "reward worker"
"""Name of the pool's processes in messages."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one call."""

    request_bytes: int
    answer_bytes: int
    num_requests: int
    concurrent: int = 1 << 20
    """Maximum number of concurrent calls; further calls wait."""


_FC_BYTES = 32 * _MIB
_PIECE = 16
"""Maximum number of requests that are sent to a worker of the pool together."""


class RemoteConfig(BaseModel):
    """Options that all backends with the wire protocol have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @property
    def limits(self) -> Limits:
        """The limits of one call."""
        raise NotImplementedError

    def _missing(self, package: str, mend: str, *variables: str) -> dict[str, str]:
        """Return the missing package, and the unset variables that options name."""
        found = {} if find_spec(package) else {"id": mend}
        named = {option: getattr(self, option) for option in variables}
        return found | {
            option: f"the environment variable {name} is not set"
            for option, name in named.items()
            if name is not None and not os.environ.get(name)
        }


class PoolConfig(RemoteConfig):
    """Options of ``rollart/Pool-v1``."""

    num_workers: PositiveInt | None = None
    """Maximum number of worker processes. If not set, the number of CPU cores."""
    num_threads: PositiveInt = 16
    """Maximum number of requests that one worker scores concurrently."""
    idle_s: NonNegative = 1.0
    """A worker without work stops after this time, including the last one."""
    start_s: Seconds = 60.0
    """Maximum time for the start of a worker."""
    max_request_bytes: Bytes = 32 * _MIB
    """Maximum size of one request."""
    sandbox: str | dict[str, Any] | None = None
    """Sandbox around each worker, for rewards that run untrusted code: the id of a sandbox, or its
    id and options. If not set, workers are not isolated."""

    @property
    def limits(self) -> Limits:
        """The limits of one call."""
        most = self.max_request_bytes
        return Limits(most, most, min(_PIECE, self.num_threads))


class HttpConfig(RemoteConfig):
    """Options of ``rollart/Http-v1``."""

    url: Annotated[str, Field(pattern=r"^https?://[^\s]+$")]
    """URL of the function, such as ``http://127.0.0.1:8080``."""
    token_env: Variable | None = None
    """Environment variable that holds the token of ``rollart serve-reward``. If not set, no token
    is sent, and the function must be on this machine or must not require a token."""
    num_requests: PositiveInt = 32
    """Maximum number of requests in one call."""
    max_concurrent: PositiveInt = 64
    """Maximum number of concurrent calls; further calls wait."""
    max_request_bytes: Annotated[int, Field(ge=4096, le=MOST_BYTES)] = 32 * _MIB
    """Maximum size of one call. Cloud Run accepts 32 MiB."""
    max_answer_bytes: Annotated[int, Field(ge=4096, le=MOST_BYTES)] = 8 * _MIB
    """Maximum size of one response."""
    memory_gb: NonNegative = 0.0
    """Memory of the function, used to count GB-seconds. 0: they are not counted."""
    check: bool = True
    """Whether to check, before the run starts, that the function is reachable and serves this
    reward."""

    @property
    def limits(self) -> Limits:
        """The limits of one call."""
        sizes = (self.max_request_bytes, self.max_answer_bytes)
        return Limits(*sizes, self.num_requests, self.max_concurrent)

    def missing(self) -> dict[str, str]:
        """Return the missing package or token, by option."""
        return self._missing("aiohttp", NO_AIOHTTP, "token_env")


class LambdaConfig(RemoteConfig):
    """Options of ``rollart/Lambda-v1``."""

    function: Annotated[str, Field(min_length=1)]
    """Name or ARN of the function."""
    qualifier: str | None = None
    """Version or alias of the function. If not set, the newest version."""
    region: str | None = None
    """AWS region, such as ``eu-central-1``. If not set, boto3 selects it."""
    endpoint_url: str | None = None
    """Endpoint of the Lambda API. If not set, the endpoint of AWS."""
    profile: str | None = None
    """Profile in ``~/.aws``. If not set, boto3 selects the credentials."""
    num_requests: PositiveInt = 32
    """Maximum number of requests in one call."""
    max_concurrent: PositiveInt = 64
    """Maximum number of concurrent calls; further calls wait."""
    max_request_bytes: Annotated[int, Field(ge=4096, le=LAMBDA_BYTES)] = LAMBDA_BYTES
    """Maximum size of one call. Lambda accepts 6 MB."""
    check: bool = True
    """Whether to check, before the run starts, that the function is reachable and serves this
    reward."""

    @property
    def limits(self) -> Limits:
        """The limits of one call."""
        sizes = (self.max_request_bytes, LAMBDA_BYTES)
        return Limits(*sizes, self.num_requests, self.max_concurrent)

    def missing(self) -> dict[str, str]:
        """Return the missing package, by option."""
        return self._missing("boto3", NO_BOTO3)


class FcConfig(RemoteConfig):
    """Options of ``rollart/Fc-v1``."""

    function: Annotated[str, Field(min_length=1)]
    """Name of the function."""
    endpoint: Annotated[str, Field(min_length=1)]
    """Endpoint of the account, such as ``ACCOUNT.cn-hangzhou.fc.aliyuncs.com``."""
    protocol: Literal["https", "http"] = "https"
    """Protocol of the endpoint. ``http`` is for endpoints on this machine."""
    qualifier: str | None = None
    """Version or alias of the function. If not set, ``LATEST``."""
    key_id_env: Variable = "ALIBABA_CLOUD_ACCESS_KEY_ID"
    """Environment variable that holds the id of the access key."""
    key_secret_env: Variable = "ALIBABA_CLOUD_ACCESS_KEY_SECRET"
    """Environment variable that holds the secret of the access key."""
    security_token_env: Variable | None = None
    """Environment variable that holds a security token, for temporary credentials."""
    memory_gb: NonNegative = 0.0
    """Memory of the function, used to count GB-seconds. 0: they are not counted."""
    num_requests: PositiveInt = 32
    """Maximum number of requests in one call."""
    max_concurrent: PositiveInt = 64
    """Maximum number of concurrent calls; further calls wait."""
    max_request_bytes: Annotated[int, Field(ge=4096, le=_FC_BYTES)] = _FC_BYTES
    """Maximum size of one call. Function Compute accepts 32 MB."""
    check: bool = True
    """Whether to check, before the run starts, that the function is reachable and serves this
    reward."""

    @property
    def limits(self) -> Limits:
        """The limits of one call."""
        sizes = (self.max_request_bytes, _FC_BYTES)
        return Limits(*sizes, self.num_requests, self.max_concurrent)

    def missing(self) -> dict[str, str]:
        """Return the missing package or keys, by option."""
        keys = ("key_id_env", "key_secret_env", "security_token_env")
        return self._missing("alibabacloud_fc20230330", NO_FC, *keys)


class RayServeConfig(RemoteConfig):
    """Options of ``rollart/RayServe-v1``."""

    address: str | None = None
    """Address of the Ray cluster: ``auto`` or ``host:port``. If not set, the cluster of the run is
    used, or a cluster is started on this machine."""
    min_replicas: Count = 0
    """Number of replicas that remain if there is nothing to score."""
    max_replicas: PositiveInt = 4
    """Maximum number of replicas."""
    num_threads: PositiveInt = 16
    """Maximum number of requests that one replica scores concurrently."""
    cpus: NonNegative = 1.0
    """Number of CPU cores that Ray reserves for a replica."""
    idle_s: NonNegative = 10.0
    """How long Ray waits before it stops an idle replica."""
    start_s: Seconds = 120.0
    """Maximum time until the function is ready."""
    num_requests: PositiveInt = 32
    """Maximum number of requests in one call."""
    max_request_bytes: Annotated[int, Field(ge=4096, le=MOST_BYTES)] = 32 * _MIB
    """Maximum size of one call."""

    @model_validator(mode="after")
    def _ordered(self) -> RayServeConfig:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas ({self.min_replicas}) must not be greater than max_replicas "
                f"({self.max_replicas})"
            )
        return self

    @property
    def limits(self) -> Limits:
        """The limits of one call."""
        return Limits(self.max_request_bytes, self.max_request_bytes, self.num_requests)

    def missing(self) -> dict[str, str]:
        """Return the missing package, by option."""
        return self._missing("ray", NO_RAY_SERVE)
