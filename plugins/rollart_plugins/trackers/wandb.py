"""Weights & Biases: metrics on a server, or in files of the run directory to upload later.

Takes: metrics. Gives: a W&B run, which is continued when the RollArt run is resumed.
Never: imports wandb before a run starts, prompts in the terminal, or stops a run if W&B is not
reachable. In that case it writes files and warns once.
"""

from __future__ import annotations

import contextlib
import math
import netrc
import os
import secrets
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from rollart_core.config.base import Seconds
from rollart_core.contracts.tracker import Tracker
from rollart_core.errors import first_line

NO_WANDB = "the wandb tracker needs wandb: pip install 'rollart[wandb]'"
_NO_KEY = "no API key: run `wandb login`, or set WANDB_API_KEY"
_ALSO_UNDER = {"api.forge.coreweave.com": "api.wandb.ai"}
"""The previous host name of W&B's own server. wandb also looks for the key under this name."""

Text = Annotated[str, Field(min_length=1)]


class WandbConfig(BaseModel):
    """Options of ``rollart/Wandb-v1``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["online", "offline"] = "online"
    """Where metrics are written. ``offline``: to files in the run directory, which ``wandb sync``
    uploads later."""
    server: Text | None = None
    """Address of a self-hosted W&B server. If not set, the server that wandb is configured for."""
    project: Text = "rollart"
    """W&B project of the run."""
    entity: Text | None = None
    """User or team that owns the project. If not set, the default of the account."""
    name: Text | None = None
    """Name of the run in W&B. If not set, the name of the run directory."""
    tags: tuple[Text, ...] = ()
    """Tags of the run in W&B."""
    timeout_s: Seconds = 30.0
    """Maximum time to wait for W&B at the start of the run, and again at its end."""

    def missing(self) -> dict[str, str]:
        """Return the missing package, by option."""
        return {"id": NO_WANDB} if find_spec("wandb") is None else {}


class WandbTracker(Tracker):
    """Log scalars by train_step, and the config.

    Args:
        config: Options of the tracker.
        options: The same options as keyword arguments, as the registry passes them.
    """

    def __init__(self, config: WandbConfig | None = None, **options: object) -> None:
        self._config = config or WandbConfig.model_validate(options)
        self._run: Any = None

    def start(self, run_dir: Path, config: Mapping[str, object]) -> None:
        """Start a W&B run, or continue the one of the run directory.

        Raises:
            ImportError: If wandb is not installed.
        """
        try:
            import wandb
        except ImportError as e:
            raise ImportError(NO_WANDB) from e
        run_id, given = _run_id(run_dir), {"dir": str(run_dir), "config": dict(config)}
        given["name"] = self._config.name or run_dir.name
        if self._config.mode == "online":
            self._run = self._online(wandb, run_id, given)
            run_id += f"-{secrets.token_hex(2)}"  # the server may already have a failed run's id
        self._run = self._run or self._begin(wandb, id=run_id, mode="offline", **given)
        self._run.define_metric("train_step", hidden=True)
        self._run.define_metric("*", step_metric="train_step")

    def log(self, metrics: Mapping[str, float], *, train_step: int, policy_version: int) -> None:
        """Log all finite metrics in one row."""
        if self._run is None:
            raise RuntimeError("log() before start(), or after close()")
        row = {**metrics, "policy_version": policy_version, "train_step": train_step}
        # W&B's own step cannot decrease, but train_step does after a rollback.
        self._run.log({name: value for name, value in row.items() if math.isfinite(value)})

    def close(self) -> None:
        """Upload the remaining metrics within ``timeout_s``; can be called twice.

        The files are complete when the process ends, because W&B writes them in a separate process.
        """
        run, self._run = self._run, None
        if run is not None:
            run.finish()

    def _online(self, wandb: Any, run_id: str, given: Mapping[str, object]) -> Any:
        """Start or continue a run on the server; if that fails, warn and return None."""
        try:
            if not _has_key(self._config.server or wandb.setup().settings.base_url):
                raise ConnectionError(_NO_KEY)
            limits = dict.fromkeys(("init_timeout", "finish_timeout"), self._config.timeout_s)
            return self._begin(wandb, limits, id=run_id, mode="online", resume="allow", **given)
        except Exception as e:
            message = (
                f"W&B is not available ({first_line(str(e) or type(e).__name__)}): metrics are "
                f"written to files, for `wandb sync {given['dir']}/wandb/offline-run-*`"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=3)
            return None

    def _begin(
        self, wandb: Any, limits: Mapping[str, float] | None = None, /, **given: object
    ) -> Any:
        own = self._config
        settings = wandb.Settings(
            console="off",  # the terminal belongs to the run
            silent=True,
            disable_code=True,
            disable_git=True,
            **(limits or {}),
            **({"base_url": own.server} if own.server else {}),
        )
        return wandb.init(
            project=own.project,
            entity=own.entity,
            tags=list(own.tags),
            reinit="create_new",
            settings=settings,
            **given,
        )


def _run_id(run_dir: Path) -> str:
    """Return the W&B id of the run, which is the same after every resume."""
    file = run_dir / "wandb" / "run-id"
    with contextlib.suppress(FileNotFoundError):
        return file.read_text(encoding="utf-8").strip()
    file.parent.mkdir(parents=True, exist_ok=True)
    run_id = secrets.token_hex(8)
    file.write_text(f"{run_id}\n", encoding="utf-8")
    return run_id


def _has_key(server: str) -> bool:
    """Return whether there is an API key for a server.

    Without a key, W&B would prompt for one and wait. The lookup is the same as in wandb: by host
    with port, in the first netrc file that exists.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    given, host = os.environ.get("NETRC"), urlsplit(server).netloc
    paths = [Path(p).expanduser() for p in ([given] if given else ["~/.netrc", "~/_netrc"])]
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        # With an explicit path, netrc accepts a file that others can read, as wandb does.
        known = netrc.netrc(next((p for p in paths if p.exists()), paths[0]))
        found = known.authenticators(host) or known.authenticators(_ALSO_UNDER.get(host, host))
        return found is not None and bool(found[2])
    return False
