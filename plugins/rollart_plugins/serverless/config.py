"""Options of the reward backends, which know what of it is not there. Never imports that."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollart_core.config.base import MOST_BYTES, Bytes, Count, NonNegative, PositiveInt, Seconds

_MIB = 1 << 20
LAMBDA_BYTES = 6 * _MIB
"""AWS Lambda takes no more, and answers no more, in a call that is waited for."""

NO_AIOHTTP = "the http backend needs aiohttp: pip install 'rollart[serverless]'"
NO_BOTO3 = "the lambda backend needs boto3: pip install 'rollart[lambda]'"
NO_FC = "the fc backend needs Function Compute's SDK: pip install 'rollart[fc]'"
NO_RAY_SERVE = "the ray_serve backend needs Ray Serve: pip install 'rollart[ray-serve]'"

Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
WORKER: Final = "reward worker"
"""What the processes of the pool are called."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much fits into one call."""

    request_bytes: int
    answer_bytes: int
    num_requests: int
    concurrent: int = 1 << 20
    """Calls under way at once; the others wait."""


_FC_BYTES = 32 * _MIB
_PIECE = 16
"""Most requests that travel to a worker of the pool together."""


class RemoteConfig(BaseModel):
    """What the options of all backends have that speak the wire."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @property
    def limits(self) -> Limits:
        """How much fits into one call."""
        raise NotImplementedError

    def _missing(self, package: str, mend: str, *variables: str) -> dict[str, str]:
        """Return what this machine has not: a package, or variables that options name."""
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
    """Most worker processes; none: as many as there are cores."""
    num_threads: PositiveInt = 16
    """Requests that one worker scores at once."""
    idle_s: NonNegative = 1.0
    """A worker without work for so long is ended; the last one too."""
    start_s: Seconds = 60.0
    """How long a worker may take to start."""
    max_request_bytes: Bytes = 32 * _MIB
    """Largest request."""
    sandbox: str | dict[str, Any] | None = None
    """Box around each worker, for rewards that run code nobody has read: a sandbox's id, or its id
    and options; none: no wall."""

    @property
    def limits(self) -> Limits:
        """How much fits into one call."""
        most = self.max_request_bytes
        return Limits(most, most, min(_PIECE, self.num_threads))


class HttpConfig(RemoteConfig):
    """Options of ``rollart/Http-v1``."""

    url: Annotated[str, Field(pattern=r"^https?://[^\s]+$")]
    """Where the function takes calls, such as ``http://127.0.0.1:8080``."""
    token_env: Variable | None = None
    """The variable of the environment that holds the token of ``rollart serve-reward``; none: no
    token is sent, and the function must be on this machine or take none."""
    num_requests: PositiveInt = 32
    """Most requests in one call."""
    max_concurrent: PositiveInt = 64
    """Most calls at once; the others wait."""
    max_request_bytes: Annotated[int, Field(ge=4096, le=MOST_BYTES)] = 32 * _MIB
    """Largest call; Cloud Run takes 32 MiB."""
    max_answer_bytes: Annotated[int, Field(ge=4096, le=MOST_BYTES)] = 8 * _MIB
    """Largest answer that is read."""
    memory_gb: NonNegative = 0.0
    """Memory of the function, for the count of GB-s; 0: they are not counted."""
    check: bool = True
    """Whether it is asked, before the run begins, if it is there and serves this reward."""

    @property
    def limits(self) -> Limits:
        """How much fits into one call."""
        sizes = (self.max_request_bytes, self.max_answer_bytes)
        return Limits(*sizes, self.num_requests, self.max_concurrent)

    def missing(self) -> dict[str, str]:
        """Return the package, or the token, that is not there."""
        return self._missing("aiohttp", NO_AIOHTTP, "token_env")


class LambdaConfig(RemoteConfig):
    """Options of ``rollart/Lambda-v1``."""

    function: Annotated[str, Field(min_length=1)]
    """Name or ARN of the function."""
    qualifier: str | None = None
    """Version or alias of it; none: the newest."""
    region: str | None = None
    """Such as ``eu-central-1``; none: as boto3 finds it."""
    endpoint_url: str | None = None
    """Of Lambda's API; none: AWS's own."""
    profile: str | None = None
    """Profile of ``~/.aws``; none: as boto3 finds credentials."""
    num_requests: PositiveInt = 32
    """Most requests in one call."""
    max_concurrent: PositiveInt = 64
    """Most calls at once; the others wait."""
    max_request_bytes: Annotated[int, Field(ge=4096, le=LAMBDA_BYTES)] = LAMBDA_BYTES
    """Largest call: Lambda takes 6 MB."""
    check: bool = True
    """Whether it is asked, before the run begins, if it is there and serves this reward."""

    @property
    def limits(self) -> Limits:
        """How much fits into one call."""
        sizes = (self.max_request_bytes, LAMBDA_BYTES)
        return Limits(*sizes, self.num_requests, self.max_concurrent)

    def missing(self) -> dict[str, str]:
        """Return the package that is not installed."""
        return self._missing("boto3", NO_BOTO3)


class FcConfig(RemoteConfig):
    """Options of ``rollart/Fc-v1``."""

    function: Annotated[str, Field(min_length=1)]
    """Name of the function."""
    endpoint: Annotated[str, Field(min_length=1)]
    """Such as ``ACCOUNT.cn-hangzhou.fc.aliyuncs.com``."""
    protocol: Literal["https", "http"] = "https"
    """``http`` is for endpoints on this machine."""
    qualifier: str | None = None
    """Version or alias of the function; none: ``LATEST``."""
    key_id_env: Variable = "ALIBABA_CLOUD_ACCESS_KEY_ID"
    """The variable that holds the access key's id."""
    key_secret_env: Variable = "ALIBABA_CLOUD_ACCESS_KEY_SECRET"
    """The variable that holds its secret."""
    security_token_env: Variable | None = None
    """The variable that holds a security token, for temporary credentials."""
    memory_gb: NonNegative = 0.0
    """Memory of the function, for the count of GB-s; 0: they are not counted."""
    num_requests: PositiveInt = 32
    """Most requests in one call."""
    max_concurrent: PositiveInt = 64
    """Most calls at once; the others wait."""
    max_request_bytes: Annotated[int, Field(ge=4096, le=_FC_BYTES)] = _FC_BYTES
    """Largest call: Function Compute takes 32 MB."""
    check: bool = True
    """Whether it is asked, before the run begins, if it is there and serves this reward."""

    @property
    def limits(self) -> Limits:
        """How much fits into one call."""
        sizes = (self.max_request_bytes, _FC_BYTES)
        return Limits(*sizes, self.num_requests, self.max_concurrent)

    def missing(self) -> dict[str, str]:
        """Return the package, or the keys, that are not there."""
        keys = ("key_id_env", "key_secret_env", "security_token_env")
        return self._missing("alibabacloud_fc20230330", NO_FC, *keys)


class RayServeConfig(RemoteConfig):
    """Options of ``rollart/RayServe-v1``."""

    address: str | None = None
    """Of the cluster: ``auto`` or ``host:port``; none: that of the run, or else one is started on
    this machine."""
    min_replicas: Count = 0
    """Replicas that stay when there is nothing to score."""
    max_replicas: PositiveInt = 4
    """Most replicas."""
    num_threads: PositiveInt = 16
    """Requests that one replica scores at once."""
    cpus: NonNegative = 1.0
    """Cores that Ray reserves for a replica."""
    idle_s: NonNegative = 10.0
    """How long Ray waits before it takes a replica away."""
    start_s: Seconds = 120.0
    """How long Ray may take until the function is up."""
    num_requests: PositiveInt = 32
    """Most requests in one call."""
    max_request_bytes: Annotated[int, Field(ge=4096, le=MOST_BYTES)] = 32 * _MIB
    """Largest call."""

    @model_validator(mode="after")
    def _ordered(self) -> RayServeConfig:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas ({self.min_replicas}) is above max_replicas ({self.max_replicas})"
            )
        return self

    @property
    def limits(self) -> Limits:
        """How much fits into one call."""
        return Limits(self.max_request_bytes, self.max_request_bytes, self.num_requests)

    def missing(self) -> dict[str, str]:
        """Return the package that is not installed."""
        return self._missing("ray", NO_RAY_SERVE)
