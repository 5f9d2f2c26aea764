"""The `fc` backend: a function on Alibaba Function Compute 3.0, called through its SDK.

Takes: calls. Gives: answers of an event function, such as `rollart serve-reward` in a custom
container. Never: retries (the scorer does), or sends the access key anywhere (the endpoint receives
a signature). Tested with an endpoint on this machine, not with the platform.
"""

from __future__ import annotations

import json
from typing import Any, Final

from rollart_core.errors import BackendFailure, ConfigError, first_line
from rollart_plugins.serverless.config import NO_FC, FcConfig
from rollart_plugins.serverless.remote import Sent
from rollart_plugins.serverless.sdk import SdkBackend

_CONNECT_MS = 10_000
_AGAIN: Final = (408, 429)
_WRONG_KEY: Final = ("SignatureDoesNotMatch", "InvalidAccessKeyID", "AccessDenied")


class FcBackend(SdkBackend[FcConfig]):
    """Calls a function of Function Compute."""

    name = "fc"
    config_model = FcConfig

    def prepare(self) -> None:
        """Read the keys."""
        super().prepare()
        config = self.config
        self._key = (self.secret(config.key_id_env), self.secret(config.key_secret_env))
        named = config.security_token_env
        self._security_token = self.secret(named) if named else None

    async def send(self, body: bytes, *, key: str, deadline_s: float, weight: int) -> Sent:
        """Invoke the function and wait for it.

        Raises:
            BackendFailure: The error of Function Compute, or of the function.
        """
        answer = await self.in_thread(lambda client: self._invoke(client, body, deadline_s))
        return Sent(answer, memory_gb=self.config.memory_gb)

    def new_client(self) -> Any:
        """Return a client of the SDK; see :class:`SdkBackend`."""
        try:
            from alibabacloud_fc20230330.client import Client
            from alibabacloud_tea_openapi.utils_models import Config
        except ModuleNotFoundError as e:
            raise ConfigError(NO_FC) from e
        key_id, key_secret = self._key
        return Client(
            Config(
                access_key_id=key_id,
                access_key_secret=key_secret,
                security_token=self._security_token,
                endpoint=self.config.endpoint,
                protocol=self.config.protocol,
                max_idle_conns=self.config.max_concurrent,
            )
        )

    def _invoke(self, client: Any, body: bytes, deadline_s: float) -> bytes:
        """Call the SDK; runs in a thread."""
        from alibabacloud_fc20230330 import models
        from darabonba.exceptions import DaraException, RetryError, UnretryableException
        from darabonba.runtime import RuntimeOptions

        config = self.config
        limits = RuntimeOptions(
            connect_timeout=_CONNECT_MS, read_timeout=max(1, int(1000 * deadline_s))
        )
        request = models.InvokeFunctionRequest(body=body, qualifier=config.qualifier)
        headers = models.InvokeFunctionHeaders(x_fc_invocation_type="Sync")
        try:
            got = client.invoke_function_with_options(config.function, request, headers, limits)
            answer = bytes(got.body.read(self._limits.answer_bytes + 1))
        except (DaraException, RetryError, UnretryableException) as e:
            raise _failure_of(config.function, e) from e
        kind = {name.lower(): value for name, value in got.headers.items()}.get("x-fc-error-type")
        if kind:
            raise BackendFailure(f"{config.function}: {kind}: {_said(answer)}")
        return answer


def _failure_of(function: str, error: Any) -> BackendFailure:
    """Return the error for an SDK error, of the SDK, the platform or the connection."""
    code = str(getattr(error, "code", "") or "")
    status = getattr(error, "status_code", None)
    message = first_line(str(getattr(error, "message", "") or error))
    if code.startswith(_WRONG_KEY):
        message = f"the access key is invalid, or not allowed to call it ({message})"
    elif code.startswith("FunctionNotFound"):
        message = f"the function does not exist ({message})"
    said = f"{function}: {code}: {message}" if code else f"{function}: {message}"
    final = isinstance(status, int) and 400 <= status < 500 and status not in _AGAIN
    return BackendFailure(said, again=not final)


def _said(answer: bytes) -> str:
    """Return the error message of a failed function."""
    try:
        return first_line(str(json.loads(answer)["errorMessage"]))
    except (ValueError, KeyError, TypeError):
        return first_line(repr(answer[:100]))
