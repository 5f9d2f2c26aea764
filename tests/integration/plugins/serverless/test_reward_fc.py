"""The fc backend with Alibaba's SDK as it is, and an endpoint of this machine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from rollart_core.contracts.reward import RewardCall, RewardRef
from rollart_core.errors import BackendFailure, ConfigError
from rollart_plugins.serverless.fc_backend import FcBackend
from rollart_testing import example_request

pytest.importorskip("alibabacloud_fc20230330")


def backend(port: int, **options: Any) -> FcBackend:
    return FcBackend(
        reward=RewardRef("support.marks_reward:Marks"),
        reward_range=(0.0, 1.0),
        timeout_s=30.0,
        function="scores",
        endpoint=f"127.0.0.1:{port}",
        protocol="http",
        **options,
    )


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIBABA_CLOUD_ACCESS_KEY_ID", "an-access-key-id")
    monkeypatch.setenv("ALIBABA_CLOUD_ACCESS_KEY_SECRET", "its-secret-half")


@pytest.mark.parametrize(
    ("status", "headers", "body", "again", "says"),
    [
        (404, {}, {"Code": "FunctionNotFound", "Message": "gone"}, False, "does not exist"),
        (403, {}, {"Code": "AccessDenied", "Message": "who?"}, False, "the access key is invalid"),
        (429, {}, {"Code": "ResourceThrottled", "Message": "slow down"}, True, "ResourceThrottled"),
        (500, {}, {"Code": "InternalServerError", "Message": "oops"}, True, "InternalServerError"),
        (
            200,
            {"x-fc-error-type": "FunctionUnhandledError"},
            {"errorMessage": "it raised"},
            True,
            "scores: FunctionUnhandledError: it raised",
        ),
        (200, {}, {"hello": "world"}, True, "has the wrong format"),
    ],
)
def test_what_function_compute_may_say(
    status: int, headers: dict[str, str], body: dict[str, str], again: bool, says: str
) -> None:
    asked: list[web.Request] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request)
        return web.json_response(body, status=status, headers=headers)

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/2023-03-30/functions/scores/invocations", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        made = backend(runner.addresses[0][1], qualifier="live")
        try:
            with pytest.raises(BackendFailure) as caught:
                await made.invoke(RewardCall((example_request(),), "key", 30.0))
            assert says in str(caught.value)
            assert caught.value.again is again
            assert len(asked) == 1
            assert asked[0].query["qualifier"] == "live"
            authorization = asked[0].headers["Authorization"]
            assert "Credential=an-access-key-id" in authorization
            assert "its-secret-half" not in str(dict(asked[0].headers))
        finally:
            await made.close()
            await runner.cleanup()

    asyncio.run(main())


def test_no_endpoint_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        made = backend(9)
        with pytest.raises(
            ConfigError, match=r"reward support\.marks_reward:Marks on fc: scores: "
        ):
            await made.open()
        await made.close()

    asyncio.run(main())
    monkeypatch.delenv("ALIBABA_CLOUD_ACCESS_KEY_ID")
    with pytest.raises(ConfigError, match="ALIBABA_CLOUD_ACCESS_KEY_ID is not set"):
        backend(9)
