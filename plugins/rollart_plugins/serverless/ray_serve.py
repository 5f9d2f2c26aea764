"""The `ray_serve` backend: a deployment of Ray Serve that scales with the load.

    call -> pieces -> handle -> replica (RewardFunction), from min_replicas to max_replicas of them

Takes: calls. Gives: answers of replicas on the run's Ray cluster, on another cluster, or on one
that it starts on this machine. Never: opens an HTTP port, leaves its deployment running, or stops a
cluster that it did not start.
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
    """A replica of Ray Serve, with one reward function.

    Args:
        reward_id: Id, alias or ``module:Class``.
        options: Options of the reward.
        num_threads: Number of requests that are scored concurrently.
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
        """Close the reward; Serve calls this when it stops a replica."""
        if function := getattr(self, "_function", None):
            function.end()


class RayServeBackend(RemoteBackend[RayServeConfig]):
    """Runs one reward in replicas of Ray Serve."""

    name = "ray_serve"
    config_model = RayServeConfig

    def prepare(self) -> None:
        """Choose the name of the application; it is deployed later."""
        self._app = f"rollart-reward-{uuid.uuid4().hex[:12]}"
        self._opening = asyncio.Lock()
        self._handle: Any = None
        self._cluster: Any = None
        self._own_serve = False
        self._begun = False

    async def open(self) -> None:
        """Deploy the reward, and send a call without requests to a replica.

        Raises:
            ConfigError: If Ray Serve or the cluster is missing, or the reward cannot be created.
        """
        await self._opened()
        await self.probe()

    async def send(self, body: bytes, *, key: str, deadline_s: float, weight: int) -> Sent:
        """Return the answer of a replica.

        Raises:
            BackendFailure: If no replica could answer, or it ended meanwhile.
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
        """Remove the deployment, and leave or stop the cluster; can be called twice."""
        await super().close()
        async with self._opening:
            begun, self._begun, self._handle = self._begun, False, None
            if begun:  # also one that failed, or was not ready in time
                with contextlib.suppress(Exception):  # the cluster can have ended
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
                        f"reward {self.reward.id} on ray_serve: not ready within "
                        f"{self.config.start_s:g} s; check that the cluster has "
                        f"{self.config.cpus:g} free cores for a replica"
                    ) from None
                except Exception as e:
                    why = self.clean(_reason(e))
                    raise ConfigError(f"reward {self.reward.id} on ray_serve: {why}") from e
            return self._handle

    def _join(self) -> None:
        """Join or start a cluster, unless this process is already in one.

        This runs in the thread of the event loop, because Ray's processes end with the thread that
        started them.
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
        # Serve's controller reserves no core; one core is added for other actors.
        num_cores = max(2, round(config.cpus * config.max_replicas) + 1)
        self._cluster = RayCluster(RayRuntime(address=config.address), self._app, num_cores)
        self._cluster.open()

    def _deploy(self) -> Any:
        """Deploy the reward, in a thread; return its handle."""
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
        except RuntimeError as e:  # its message only says that it failed
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
    """Return whether Serve is already running on this cluster."""
    import ray

    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True


def _told(app: str) -> str:
    """Return Serve's messages about a failed deployment."""
    from ray import serve

    found = serve.status().applications.get(app)
    deployments = found.deployments.values() if found else ()
    return "\n".join(one.message for one in deployments)


def _path() -> str:
    return os.pathsep.join(p for p in sys.path if p)


def _reason(error: Exception) -> str:
    """Return the line of Ray's error that contains the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    selected = [line for line in lines if "Error: " in line or "error: " in line]
    chosen = (selected or lines or [type(error).__name__])[-1]
    return first_line(chosen.removeprefix(f"{UserError.__module__}.UserError: "))
