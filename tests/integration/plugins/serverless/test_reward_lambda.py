"""The lambda backend with boto3 and awslambdaric as they are, and a Lambda of this machine."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any

import pytest
from support.pace import scaled, until

from rollart_bench.local_lambda import FunctionSettings, LocalLambda
from rollart_core.contracts.reward import RewardCall, RewardRef, RewardRequest, RewardResult
from rollart_core.errors import BackendFailure, ConfigError
from rollart_plugins.serverless.lambda_backend import LambdaBackend
from rollart_testing import example_request

pytest.importorskip("boto3")
pytest.importorskip("awslambdaric")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MARKS = "support.marks_reward:Marks"


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")


def backend(local: LocalLambda, **options: Any) -> LambdaBackend:
    return LambdaBackend(
        reward=RewardRef(MARKS),
        reward_range=(0.0, 1.0),
        timeout_s=60.0,
        **{"function": "reward", "endpoint_url": local.url, "max_concurrent": 4, **options},
    )


def call(*requests: RewardRequest, key: str = "key") -> RewardCall:
    return RewardCall(requests or (example_request(),), key, 60.0)


async def failure(made: LambdaBackend, *requests: RewardRequest) -> BackendFailure:
    with pytest.raises(BackendFailure) as caught:
        await made.invoke(call(*requests))
    await made.close()
    return caught.value


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        ("odd_lambda.raises", "the function failed: LookupError: nobody home"),
        ("odd_lambda.ends", "Runtime.ExitError: .* exit status 7"),
        ("odd_lambda.sleeps", r"Task timed out after 3\.00 seconds"),
        ("odd_lambda.babbles", "has the wrong format: version None, not 2"),
        ("odd_lambda.missing", "Runtime.HandlerNotFound"),
        ("no_such_module.handler", "Runtime.ImportModuleError"),
    ],
)
def test_a_function_that_fails_is_a_failure_with_a_reason(handler: str, says: str) -> None:
    async def main() -> None:
        timeout_s = 3.0 if "sleeps" in handler else 60.0
        settings = FunctionSettings(MARKS, handler=f"support.{handler}", timeout_s=timeout_s)
        async with LocalLambda(settings) as local:
            error = await failure(backend(local))
            assert error.again
            assert re.search(says, str(error)), str(error)

    asyncio.run(main())


def test_what_lambda_bills_and_when_it_is_cold() -> None:
    async def main() -> None:
        settings = FunctionSettings(MARKS, memory_mb=512, idle_s=600)
        async with LocalLambda(settings) as local:
            made = backend(local)
            first, second = await made.invoke(call(key="a")), await made.invoke(call(key="b"))
            assert (first.cost.cold, second.cost.cold) == (True, False)
            assert first.cost.billed_gb_s > 0
            assert first.cost.billed_gb_s * 1000 / 0.5 % 1 == pytest.approx(0, abs=1e-6)
            local.settings = replace(settings, idle_s=0.0)
            await until(lambda: not local.num_instances, "the end of the instance")
            local.settings = settings
            assert (await made.invoke(call(key="c"))).cost.cold
            await made.close()

    asyncio.run(main())


class HeldLambda(LocalLambda):
    """Starts no call before the gate is open."""

    def __init__(self, settings: FunctionSettings) -> None:
        super().__init__(settings)
        self.gate = asyncio.Event()

    async def _offer(self, call: Any) -> None:
        await self.gate.wait()
        await super()._offer(call)


def test_what_lambda_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with HeldLambda(FunctionSettings(MARKS, concurrency=1)) as local:
            made = backend(local, function="none")
            with pytest.raises(ConfigError, match=r"on lambda: none: .* does not exist"):
                await made.open()
            assert not (await failure(made)).again
            made = LambdaBackend(
                reward=RewardRef(MARKS),
                reward_range=(0.0, 1.0),
                timeout_s=60.0,
                function="reward",
                endpoint_url=local.url,
            )
            calls = {asyncio.create_task(made.invoke(call(key=str(n)))) for n in range(2)}
            async with asyncio.timeout(scaled(60)):
                (refused,), held = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            local.gate.set()
            error = refused.exception()
            assert isinstance(error, BackendFailure)
            assert "TooManyRequestsException: Rate Exceeded" in str(error)
            assert error.again
            (answered,) = await asyncio.gather(*held)
            assert isinstance(answered.results[0], RewardResult)
            large = replace(example_request(), split="x" * 7_000_000)
            answer = await made.invoke(call(example_request(), large, key="large"))
            assert isinstance(answer.results[0], RewardResult)
            assert "a request of 7.0 MB: the limit of lambda is 6.3 MB" in str(answer.results[1])
            await made.close()
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                monkeypatch.delenv(name)
            monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
            monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
            error = await failure(backend(local))
            assert "found no AWS credentials" in str(error)
            assert not error.again

    asyncio.run(main())
