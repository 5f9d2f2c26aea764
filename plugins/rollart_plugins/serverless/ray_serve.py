"""The `ray_serve` backend: a deployment of Ray Serve that scales with what there is to score.

    call -> pieces -> handle -> replica (RewardFunction), from min_replicas to max_replicas of them

Takes: calls. Gives: answers of replicas on the run's own Ray cluster, on another, or on one that it
starts on this machine. Never: opens an HTTP port, leaves its deployment behind, or ends a cluster
that it did not start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import uuid
from typing import Any, Final

from rollart_core.errors import BackendFailure, ConfigError, UserError, first_line
from rollart_plugins.serverless.config import NO_RAY_SERVE, RayServeConfig
from rollart_plugins.serverless.function import RewardFunction
from rollart_plugins.serverless.remote import RemoteBackend, Sent
from rollart_plugins.serverless.wire import Refused

_MIN_IDLE_S: Final = 0.1


class RewardReplica:
    """What Ray runs: one reward function in each replica.

    Args:
        reward_id: Id, alias or ``module:Class``.
        options: The reward's own.
        num_threads: Requests scored at once.
    """

    def __init__(self, reward_id: str, options: dict[str, Any], num_threads: int) -> None:
        self._function = RewardFunction(reward_id, options, num_threads=num_threads)

    async def __call__(self, body: bytes) -> bytes:
        """Answer a call, or refuse it."""
        try:
            return await self._function.answer(body)
        except Refused as e:
            return e.body()

    def __del__(self) -> None:
        """Close the reward; Serve calls this when it takes a replica away."""
        if function := getattr(self, "_function", None):
            function.end()


class RayServeBackend(RemoteBackend[RayServeConfig]):
    """Runs one reward in replicas of Ray Serve."""

    name = "ray_serve"
    config_model = RayServeConfig

    def prepare(self) -> None:
        """Name the application; it is deployed later."""
        self._app = f"rollart-reward-{uuid.uuid4().hex[:12]}"
        self._opening = asyncio.Lock()
        self._handle: Any = None
        self._cluster: Any = None
        self._own_serve = False
        self._begun = False

    async def open(self) -> None:
        """Deploy the reward, and have a replica score nothing.

        Raises:
            ConfigError: When there is no Ray Serve, no cluster, or the reward cannot be made there.
        """
        await self._opened()
        await self.probe()

    async def send(self, body: bytes, *, key: str, deadline_s: float, weight: int) -> Sent:
        """Have a replica answer.

        Raises:
            BackendFailure: When none could, or it died meanwhile.
        """
        try:
            handle = await self._opened()
        except ConfigError as e:
            raise BackendFailure(str(e), again=False) from e
        from ray.exceptions import RayError

        response = handle.remote(body)
        try:
            return Sent(await response)
        except asyncio.CancelledError:
            response.cancel()
            raise
        except RayError as e:
            raise BackendFailure(f"its replica failed: {_reason(e)}") from e

    async def close(self) -> None:
        """Take the deployment away, and leave the cluster or end it; may be called twice."""
        await super().close()
        async with self._opening:
            begun, self._begun, self._handle = self._begun, False, None
            if begun:  # also one that failed, or was not up in time
                with contextlib.suppress(Exception):  # the cluster may be gone
                    await asyncio.to_thread(self._undeploy)
            self._leave()

    async def _opened(self) -> Any:
        async with self._opening:
            if self._closed:
                raise self._is_closed()
            if self._handle is None:
                self._join()
                try:
                    async with asyncio.timeout(self.config.start_s):
                        self._handle = await asyncio.to_thread(self._deploy)
                except TimeoutError:
                    raise ConfigError(
                        f"reward {self.reward.id} on ray_serve: not up within "
                        f"{self.config.start_s:g} s: has the cluster {self.config.cpus:g} free "
                        "cores for a replica?"
                    ) from None
                except Exception as e:
                    why = self.clean(_reason(e))
                    raise ConfigError(f"reward {self.reward.id} on ray_serve: {why}") from e
            return self._handle

    def _join(self) -> None:
        """Join or start a cluster, unless this process is in one.

        In the loop's own thread: Ray's processes die with the thread that started them.
        """
        try:
            import ray
            from ray import serve  # noqa: F401 - it needs more packages than ray itself
        except ImportError as e:
            raise ConfigError(NO_RAY_SERVE) from e
        if ray.is_initialized():
            return
        from rollart_core.config.runtime import RayRuntime
        from rollart_ray.cluster import RayCluster

        config = self.config
        # Serve's own controller has no reserved core; one more is for what else there is.
        num_cores = max(2, round(config.cpus * config.max_replicas) + 1)
        self._cluster = RayCluster(RayRuntime(address=config.address), self._app, num_cores)
        self._cluster.open()

    def _deploy(self) -> Any:
        """Deploy the reward, in a thread; returns the way to it."""
        from ray import serve

        config, self._begun = self.config, True
        idle_s = max(_MIN_IDLE_S, config.idle_s)
        self._own_serve = not _serve_runs()
        if self._own_serve:
            serve.start(proxy_location="Disabled")
        deployment = serve.deployment(
            RewardReplica,
            name="reward",
            max_ongoing_requests=config.num_threads,
            ray_actor_options={
                "num_cpus": config.cpus,
                "runtime_env": {"env_vars": {"PYTHONPATH": _path()}},
            },
            autoscaling_config={
                "min_replicas": config.min_replicas,
                "initial_replicas": max(1, config.min_replicas),
                "max_replicas": config.max_replicas,
                "target_ongoing_requests": 2,
                "upscale_delay_s": 0.2,
                "downscale_delay_s": idle_s,
            },
        )
        ref = self.reward
        bound = deployment.bind(ref.id, dict(ref.options), config.num_threads)
        try:
            return serve.run(bound, name=self._app, route_prefix=None)
        except RuntimeError as e:  # which says only that it failed
            raise RuntimeError(_told(self._app) or str(e)) from e

    def _undeploy(self) -> None:
        from ray import serve

        if self._own_serve:
            serve.shutdown()
        else:
            serve.delete(self._app)

    def _leave(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()


def _serve_runs() -> bool:
    """Return whether somebody has started Serve on this cluster."""
    import ray

    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True


def _told(app: str) -> str:
    """Return what Serve knows of a deployment that failed."""
    from ray import serve

    found = serve.status().applications.get(app)
    deployments = found.deployments.values() if found else ()
    return "\n".join(one.message for one in deployments)


def _path() -> str:
    return os.pathsep.join(p for p in sys.path if p)


def _reason(error: Exception) -> str:
    """Return the line of Ray's many that says why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Error: " in line or "error: " in line]
    chosen = (telling or lines or [type(error).__name__])[-1]
    return first_line(chosen.removeprefix(f"{UserError.__module__}.UserError: "))
