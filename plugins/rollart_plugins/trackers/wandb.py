"""Weights & Biases: metrics on a server, or in files of the run directory to upload later.

Takes: metrics. Gives: a run of W&B, which a resume goes on with. Never: imports wandb before a run
starts, asks anything of the terminal, or stops a run because W&B cannot be reached: then it writes
files, and says so once.
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
_NO_KEY = "there is no key: `wandb login`, or set WANDB_API_KEY"
_ALSO_UNDER = {"api.forge.coreweave.com": "api.wandb.ai"}
"""The host that W&B's own server had before, under which wandb finds its key too."""

Text = Annotated[str, Field(min_length=1)]


class WandbConfig(BaseModel):
    """Options of ``rollart/Wandb-v1``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["online", "offline"] = "online"
    """``offline``: files in the run directory, which ``wandb sync`` uploads later."""
    server: Text | None = None
    """Address of a server of one's own; none: the one that wandb is set up for."""
    project: Text = "rollart"
    """What W&B puts the run under."""
    entity: Text | None = None
    """Whose project: a user or a team; none: the default of the account."""
    name: Text | None = None
    """What W&B calls the run; none: the name of the run directory."""
    tags: tuple[Text, ...] = ()
    """Labels to find it by."""
    timeout_s: Seconds = 30.0
    """How long to wait for W&B when the run begins, and again when it ends."""

    def missing(self) -> dict[str, str]:
        """Return the package that is not installed."""
        return {"id": NO_WANDB} if find_spec("wandb") is None else {}


class WandbTracker(Tracker):
    """Logs scalars by train_step, and the config.

    Args:
        config: The tracker's own options.
        options: The same one by one, as the registry gives them.
    """

    def __init__(self, config: WandbConfig | None = None, **options: object) -> None:
        self._config = config or WandbConfig.model_validate(options)
        self._run: Any = None

    def start(self, run_dir: Path, config: Mapping[str, object]) -> None:
        """Begin a run of W&B, or go on with that of the run directory.

        Raises:
            ImportError: When wandb is not installed; says how to install it.
        """
        try:
            import wandb
        except ImportError as e:
            raise ImportError(NO_WANDB) from e
        run_id, given = _run_id(run_dir), {"dir": str(run_dir), "config": dict(config)}
        given["name"] = self._config.name or run_dir.name
        if self._config.mode == "online":
            self._run = self._online(wandb, run_id, given)
            run_id += f"-{secrets.token_hex(2)}"  # one that failed may be known already
        self._run = self._run or self._begin(wandb, id=run_id, mode="offline", **given)
        self._run.define_metric("train_step", hidden=True)
        self._run.define_metric("*", step_metric="train_step")

    def log(self, metrics: Mapping[str, float], *, train_step: int, policy_version: int) -> None:
        """Log each finite metric, in one row."""
        if self._run is None:
            raise RuntimeError("log() before start(), or after close()")
        row = {**metrics, "policy_version": policy_version, "train_step": train_step}
        # Not W&B's own step, which may only grow: after a rollback some come again.
        self._run.log({name: value for name, value in row.items() if math.isfinite(value)})

    def close(self) -> None:
        """Upload what is left, within ``timeout_s``; may be called twice.

        Files are whole when the process ends: W&B writes them beside it.
        """
        run, self._run = self._run, None
        if run is not None:
            run.finish()

    def _online(self, wandb: Any, run_id: str, given: Mapping[str, object]) -> Any:
        """Begin a run on the server, or go on with it; None, with a warning, where that fails."""
        try:
            if not _has_key(self._config.server or wandb.setup().settings.base_url):
                raise ConnectionError(_NO_KEY)
            limits = dict.fromkeys(("init_timeout", "finish_timeout"), self._config.timeout_s)
            return self._begin(wandb, limits, id=run_id, mode="online", resume="allow", **given)
        except Exception as e:
            message = (
                f"W&B cannot be used ({first_line(str(e) or type(e).__name__)}): metrics go to "
                f"files, for `wandb sync {given['dir']}/wandb/offline-run-*`"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=3)
            return None

    def _begin(
        self, wandb: Any, limits: Mapping[str, float] | None = None, /, **given: object
    ) -> Any:
        own = self._config
        settings = wandb.Settings(
            console="off",  # the terminal is the run's own
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
    """Return what W&B knows the run by: the same for every resume."""
    file = run_dir / "wandb" / "run-id"
    with contextlib.suppress(FileNotFoundError):
        return file.read_text(encoding="utf-8").strip()
    file.parent.mkdir(parents=True, exist_ok=True)
    run_id = secrets.token_hex(8)
    file.write_text(f"{run_id}\n", encoding="utf-8")
    return run_id


def _has_key(server: str) -> bool:
    """Tell whether there is a key for a server; without one W&B would ask, and wait for it.

    It is looked for as wandb does: by host with port, in the first netrc file that is there.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    given, host = os.environ.get("NETRC"), urlsplit(server).netloc
    paths = [Path(p).expanduser() for p in ([given] if given else ["~/.netrc", "~/_netrc"])]
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        # Given a path, netrc takes a file that others may read, as wandb does.
        known = netrc.netrc(next((p for p in paths if p.exists()), paths[0]))
        found = known.authenticators(host) or known.authenticators(_ALSO_UNDER.get(host, host))
        return found is not None and bool(found[2])
    return False
