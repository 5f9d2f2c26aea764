"""The `lambda` backend: a function on AWS Lambda, called through boto3.

Takes: calls. Gives: answers of a function with the handler ``lambda_handler.handler``, with the
amount that Lambda bills for each. Never: lets boto3 retry (the scorer does), sends more than Lambda
accepts, or stores credentials: boto3 finds them in its usual places.
"""

from __future__ import annotations

import base64
import json
import re
from typing import Any, Final

from rollart_core.errors import BackendFailure, ConfigError, first_line
from rollart_plugins.serverless.config import LAMBDA_BYTES, NO_BOTO3, LambdaConfig
from rollart_plugins.serverless.remote import Sent
from rollart_plugins.serverless.sdk import SdkBackend

_CONNECT_S = 10.0
_FINAL: Final = {
    "ResourceNotFoundException": "the function does not exist",
    "AccessDeniedException": "these credentials are not allowed to call it",
    "UnrecognizedClientException": "these credentials are invalid",
    "InvalidSignatureException": "these credentials are invalid",
    "InvalidClientTokenId": "these credentials are invalid",
    "ExpiredTokenException": "these credentials have expired",
    "RequestTooLargeException": "the call is too large for Lambda",
    "RequestEntityTooLargeException": "the call is too large for Lambda",
    "InvalidParameterValueException": "Lambda rejects this call",
    "ValidationException": "Lambda rejects this call",
}
"""Errors for which a retry does not help. For all others, it can."""
_REPORT: Final = re.compile(
    r"Billed Duration: (?P<ms>[\d.]+) ms\s+Memory Size: (?P<mb>\d+) MB(?P<rest>.*)", re.DOTALL
)


class LambdaBackend(SdkBackend[LambdaConfig]):
    """Calls a Lambda function."""

    name = "lambda"
    config_model = LambdaConfig

    async def send(self, body: bytes, *, key: str, deadline_s: float, weight: int) -> Sent:
        """Invoke the function and wait for it.

        Raises:
            BackendFailure: The error of Lambda, or of the function.
        """
        got = await self.in_thread(lambda client: self._invoke(client, body))
        if got.get("FunctionError"):
            raise _function_failure(self.config.function, got["Payload"])
        ms, mb, cold = _report(got.get("LogResult", ""))
        return Sent(got["Payload"], cold=cold, billed_gb_s=ms / 1000 * mb / 1024)

    async def close(self) -> None:
        """Close the connections; can be called twice."""
        await super().close()
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def new_client(self) -> Any:
        """Return a client of boto3; see :class:`SdkBackend`."""
        try:
            import boto3
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError
        except ModuleNotFoundError as e:
            raise ConfigError(NO_BOTO3) from e
        config = self.config
        settings = Config(
            connect_timeout=min(_CONNECT_S, self._timeout_s),
            read_timeout=self._timeout_s,
            retries={"total_max_attempts": 1},
            max_pool_connections=config.max_concurrent,
        )
        try:
            session = boto3.Session(profile_name=config.profile, region_name=config.region)
            return session.client("lambda", endpoint_url=config.endpoint_url, config=settings)
        except BotoCoreError as e:
            raise ConfigError(f"lambda {config.function}: {first_line(str(e))}") from e

    def _invoke(self, client: Any, body: bytes) -> dict[str, Any]:
        """Call boto3; runs in a thread."""
        from botocore.exceptions import (
            BotoCoreError,
            ClientError,
            NoCredentialsError,
            ReadTimeoutError,
        )

        config = self.config
        more = {"Qualifier": config.qualifier} if config.qualifier else {}
        try:
            got = client.invoke(
                FunctionName=config.function,
                InvocationType="RequestResponse",
                LogType="Tail",
                Payload=body,
                **more,
            )
            return {**got, "Payload": got["Payload"].read(LAMBDA_BYTES + 1)}
        except ClientError as e:
            raise _client_failure(config.function, e.response) from e
        except ReadTimeoutError as e:
            raise TimeoutError from e
        except NoCredentialsError as e:
            message = f"{config.function}: boto3 found no AWS credentials"
            raise BackendFailure(message, again=False) from e
        except BotoCoreError as e:
            raise BackendFailure(f"{config.function}: {first_line(str(e))}") from e


def _client_failure(function: str, response: Any) -> BackendFailure:
    error = response.get("Error", {})
    code, message = str(error.get("Code", "")), first_line(str(error.get("Message", "")))
    known = _FINAL.get(code)
    said = f"{function}: {code}: {known or message}"
    if known and message:
        said += f" ({message})"
    headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    after = str(headers.get("retry-after", ""))
    wait_s = float(after) if after.isdigit() else None
    return BackendFailure(said, again=known is None, wait_s=wait_s)


def _function_failure(function: str, payload: bytes) -> BackendFailure:
    """Return the error of a failed function: it raised, ended, or exceeded its time limit."""
    try:
        said = json.loads(payload)
        message = f"{said.get('errorType', '')}: {said['errorMessage']}".removeprefix(": ")
    except (ValueError, KeyError, TypeError, AttributeError):
        message = payload[:200].decode(errors="replace")
    return BackendFailure(f"{function}: the function failed: {first_line(message)}")


def _report(log: str) -> tuple[float, float, bool | None]:
    """Return billed milliseconds, memory in MB, and whether it was cold; zeros if unknown."""
    try:
        text = base64.b64decode(log).decode(errors="replace")
    except ValueError:
        return 0.0, 0.0, None
    found = _REPORT.search(text)
    if found is None:
        return 0.0, 0.0, None
    return float(found["ms"]), float(found["mb"]), "Init Duration" in found["rest"]
