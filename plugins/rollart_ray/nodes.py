"""Preflight checks of the nodes of a cluster before a run starts.

Takes: a run, and the nodes of its workers. Gives: what is missing, one line each with the node and
the fix. Never: changes a node, except for a file that it writes and removes.

The checks are functions that run on a node. They are sent by value, without their module, so that a
node with no rollart, or another version, can still run them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollart_core.config.model import ModelPath
from rollart_core.config.resolve import ResolvedRun
from rollart_core.errors import ConfigError
from rollart_core.plugins import registry
from rollart_core.runtime.placement import shm_fault
from rollart_ray.cluster import RayCluster
from rollart_ray.pools import Node

MISSING = "none"
"""The version of a missing distribution."""

SANDBOX_S = 240.0
"""Time limit to start one sandbox on a node that has its image."""
Nodes = Mapping[str, Sequence[Node]]
"""Role -> the node of each of its workers."""


def versions(distributions: Sequence[str]) -> dict[str, str]:
    """Return the versions of Python and of these distributions in this process."""
    return ask_versions(distributions)()


def ask_versions(distributions: Sequence[str]) -> Callable[[], dict[str, str]]:
    """Return a function that returns a node's versions."""
    wanted = list(distributions)

    def versions() -> dict[str, str]:
        import platform
        from importlib.metadata import PackageNotFoundError, version

        found = {"Python": ".".join(platform.python_version_tuple()[:2])}
        for name in wanted:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = "none"
        return found

    return versions


def differences(driver: Mapping[str, str], nodes: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the differences of nodes from the driver, one line per node.

    Args:
        driver: The driver's versions.
        nodes: Title of a node -> its versions.
    """
    found = []
    for title, theirs in nodes.items():
        other = [
            f"{name} {_said(theirs.get(name, MISSING))} (here {_said(ours)})"
            for name, ours in driver.items()
            if theirs.get(name, MISSING) != ours
        ]
        if other:
            found.append(f"node {title} has {', '.join(other)}: install the same there")
    return found


def ask_whether_seen(path: str, text: str) -> Callable[[], bool]:
    """Return a function that returns whether a node reads ``text`` in a file at ``path``."""

    def seen() -> bool:
        try:
            with open(path, encoding="utf-8") as file:
                return file.read() == text
        except OSError:
            return False

    return seen


def ask_to_write(path: str, text: str) -> Callable[[], str]:
    """Return a function that writes a file and returns an error, or an empty string."""

    def write() -> str:
        import os

        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as e:
            return str(e)
        return ""

    return write


def ask_to_remove(path: str) -> Callable[[], None]:
    """Return a function that removes a file or a folder if it exists."""

    def remove() -> None:
        import os
        import shutil

        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        elif os.path.exists(path):
            os.unlink(path)

    return remove


def ask_for_model(path: str) -> Callable[[], dict[str, str]]:
    """Return a function that returns a node's files of a model, with a mark of their content.

    The mark is the size, and for JSON files a digest. Weights are too large to be read here.
    """

    def files() -> dict[str, str]:
        import hashlib
        import os

        found = {}
        for name in sorted(os.listdir(path)) if os.path.isdir(path) else []:
            file = os.path.join(path, name)
            if name.endswith((".json", ".safetensors", ".bin", ".model", ".txt", ".jinja")):
                found[name] = str(os.path.getsize(file))
                if name.endswith(".json"):
                    with open(file, "rb") as content:
                        found[name] += " " + hashlib.sha256(content.read()).hexdigest()[:16]
        return found

    return files


def model_faults(path: str, answers: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return one line for each node that lacks a local model, or has another one.

    Args:
        path: The folder.
        answers: Title of a node -> its files, as :func:`ask_for_model` returns them.
    """
    first = next((title for title, files in answers.items() if files), None)
    faults = []
    for title, files in answers.items():
        if not files:
            faults.append(
                f"node {title} has no {path}: put the model on a file system that all nodes share, "
                "or at the same path everywhere, or name it by its hub id"
            )
        elif first is not None and files != answers[first]:
            names = {n for n in {*files, *answers[first]} if files.get(n) != answers[first].get(n)}
            faults.append(
                f"node {title} has another model in {path} than node {first} ({min(names)} "
                "differs): copy one of them to all nodes"
            )
    return faults


def ask_the_time() -> Callable[[], float]:
    """Return a function that returns a node's clock, in seconds since the epoch."""

    def now() -> float:
        import time

        return time.time()

    return now


AskTheTime = Callable[[Callable[[], float]], Awaitable[Mapping[str, float]]]
CLOCK_QUESTIONS = 3
CLOCKS_APART_S = 1.0
"""Largest difference of clocks; tokens of Ray and times in the journal depend on them."""


def clock_faults(rounds: Sequence[tuple[float, Mapping[str, float], float]]) -> list[str]:
    """Return one line for each node whose clock surely differs from that of this process.

    Args:
        rounds: For each time that the nodes were asked: the time here before the question, title
            of a node -> its time, and the time here after all answers.
    """
    faults = []
    for title in rounds[0][1]:
        apart_s = max(max(before - t[title], t[title] - after) for before, t, after in rounds)
        if apart_s > CLOCKS_APART_S:
            faults.append(
                f"the clock of node {title} differs by at least {apart_s:.1f} s from this "
                "machine's: synchronize all nodes, for example with chrony"
            )
    return faults


async def compare_clocks(ask: AskTheTime) -> tuple[list[str], float]:
    """Ask all nodes for their time, and compare it with that of this process.

    The first question waits until a process starts on each node, so its answer bounds the
    difference only loosely. The best bound of several questions counts.

    Args:
        ask: Sends a question to all nodes; returns title of a node -> its answer.

    Returns:
        One line per node that differs, and the uncertainty in seconds.
    """
    rounds = []
    for _ in range(CLOCK_QUESTIONS):
        before_s = time.time()
        answers = await ask(ask_the_time())
        rounds.append((before_s, answers, time.time()))
    return clock_faults(rounds), min(after - before for before, _, after in rounds)


def ask_for_free_bytes(path: str) -> Callable[[], int]:
    """Return a function that returns the free bytes of a node's file system at ``path``."""

    def free() -> int:
        import os
        import shutil

        folder = path
        while not os.path.exists(folder):
            folder = os.path.dirname(folder)
        return shutil.disk_usage(folder).free

    return free


def ask_for_a_port(host: str) -> Callable[[], int]:
    """Return a function that finds a free port of a node."""

    def find() -> int:
        import socket

        with socket.socket() as listener:
            listener.bind((host, 0))
            return int(listener.getsockname()[1])

    return find


def check_what_is_missing(
    kind: str, plugin_id: str, options: Mapping[str, Any], passed: Sequence[str]
) -> Callable[[], list[str]]:
    """Return a function that returns what a plugin's options name but a node lacks.

    Args:
        kind: The kind of the plugin, such as ``inference_engines``.
        plugin_id: Its id.
        options: Its validated options.
        passed: Names of environment variables that its worker receives.
    """
    given, known = dict(options), dict.fromkeys(passed, "passed by the run")

    def problems() -> list[str]:
        from rollart_core.config.resolve_plugin import missing
        from rollart_ray.local import variables

        with variables(known):
            return [problem.within() for problem in missing(kind, plugin_id, given)]

    return problems


def check_sandbox_on_node(
    env_id: str, options: Mapping[str, Any]
) -> Callable[[], tuple[str, str] | None]:
    """Return a function that starts a sandbox of an environment on a node with this rollart.

    The function returns the fault and its fix, or None.
    """
    given = dict(options)

    def fault() -> tuple[str, str] | None:
        from rollart_core.errors import RollartError, first_line
        from rollart_core.plugins import registry
        from rollart_core.rollout import loop
        from rollart_sandboxes.pool.doctor import diagnose
        from rollart_sandboxes.pool.source import close_all

        try:
            if registry.ISOLATION in given:
                from rollart_sandboxes.isolation.describe import describe

                describe(env_id, given)
                return None
            sandbox = dict(given["sandbox"])
            found = loop.run(diagnose(sandbox.pop("id"), sandbox))
        except RollartError as e:
            return first_line(str(e)), ""
        finally:
            close_all()
        if found.works:
            return None
        bad = [f for f in found.findings if f.state == "bad"] or list(found.findings)
        return f"{found.sandbox}: {bad[-1].what}: {bad[-1].says}", bad[-1].mend

    return fault


def _said(version: str) -> str:
    return "not installed" if version == MISSING else version


class NodeChecks:
    """The checks; each returns one line per node that lacks something."""

    def __init__(self, run: ResolvedRun, run_dir: Path, cluster: RayCluster) -> None:
        """Bind a run to its cluster."""
        self._run = run
        self._run_dir = run_dir
        self._cluster = cluster
        self._passed: tuple[str, ...] = getattr(run.config.runtime, "env_vars", ())

    async def versions(self, nodes: Sequence[Node]) -> list[str]:
        """Every node has this process's Python, Ray, RollArt and plugins."""
        names = {p.distribution for p in self._run.plugins} | {"rollart", "ray"}
        here = versions(sorted(names))
        here = {name: found for name, found in here.items() if found != MISSING}
        answers = await self._cluster.ask(ask_versions(sorted(names)), nodes)
        theirs = {node.title: found for node, found in answers.items()}
        return differences(here, theirs)

    async def workers(self, nodes: Nodes, classes: Sequence[str], shared: Path) -> list[str]:
        """Return what workers need but their nodes lack.

        Args:
            nodes: The nodes of the workers.
            classes: The pool of each engine.
            shared: The folder that trainer and engines share.
        """
        return [
            *await self.clocks(nodes),
            *await self.files(nodes),
            *await self.weights(nodes, shared),
            *await self.engines(classes, nodes["engine"]),
            *await self.environments(nodes["env"]),
            *await self.sandboxes(nodes["env"]),
        ]

    async def files(self, nodes: Nodes) -> list[str]:
        """Workers can access the run directory, and their nodes have the model's folder."""
        computing, faults = [*nodes["trainer"], *nodes["engine"]], []
        model = self._run.config.model
        if not isinstance(model, ModelPath):
            computing.append(nodes["env"][0])  # creates it
        elif Path(model.path).is_dir():
            answers = await self._cluster.ask(ask_for_model(model.path), computing)
            faults = model_faults(model.path, {n.title: files for n, files in answers.items()})
        probe, text = self._run_dir / ".seen", secrets.token_hex(8)
        probe.write_text(text, encoding="utf-8")
        try:
            seen = await self._cluster.ask(ask_whether_seen(str(probe), text), computing)
        finally:
            probe.unlink()
        return faults + [
            f"node {node.title} does not see {self._run_dir}: set runs_dir to a folder on a file "
            "system that all nodes share (model, checkpoints and logs go there)"
            for node, found in seen.items()
            if not found
        ]

    async def clocks(self, nodes: Nodes) -> list[str]:
        """The clocks of all nodes agree with this machine's."""
        everywhere = [node for role in nodes.values() for node in role]

        async def ask(question: Callable[[], float]) -> dict[str, float]:
            answers = await self._cluster.ask(question, everywhere)
            return {node.title: answer for node, answer in answers.items()}

        return (await compare_clocks(ask))[0]

    async def weights(self, nodes: Nodes, shared: Path) -> list[str]:
        """The engines see the trainer's files, if the channel needs that."""
        if self._run.weights.spec.reach != "machine":
            return []
        trainer, engines = nodes["trainer"][0], nodes["engine"]
        probe, text = str(shared / ".seen"), secrets.token_hex(8)
        wrong = (await self._cluster.ask(ask_to_write(probe, text), [trainer]))[trainer]
        seen = await self._cluster.ask(ask_whether_seen(probe, text), engines)
        await self._cluster.ask(ask_to_remove(probe), [trainer])
        if wrong:
            return [f"node {trainer.title} cannot write to {shared}: {wrong}"]
        free = (await self._cluster.ask(ask_for_free_bytes(str(shared)), [trainer]))[trainer]
        if fault := shm_fault(self._run, str(shared.parent), free):
            return [f"node {trainer.title}: {fault}"]
        return [
            f"node {node.title} does not share its memory with {trainer.title}, where the trainer "
            f"is: weights: {self._run.config.weights.id} works on one machine; use weights: "
            "collective, or disk with runs_dir on a file system that all nodes share"
            for node, found in seen.items()
            if not found
        ]

    async def engines(self, classes: Sequence[str], nodes: Sequence[Node]) -> list[str]:
        """Every engine node has the files in its class's options."""
        faults = []
        for pool in dict.fromkeys(classes):
            engine = self._run.engine_on(pool)
            here = [node for name, node in zip(classes, nodes, strict=True) if name == pool]
            spec_id, options = engine.spec.id, engine.options
            question = check_what_is_missing("inference_engines", spec_id, options, self._passed)
            for node, lines in (await self._cluster.ask(question, here)).items():
                faults += [f"node {node.title}: engine {engine.spec.id}: {line}" for line in lines]
        return faults

    async def environments(self, nodes: Sequence[Node]) -> list[str]:
        """Every node of env workers has the files in each environment's options.

        Options of a sandbox name no file here; another check starts one.
        """
        faults = []
        for env in self._run.envs:
            name, options = env.plugin.spec.id, dict(env.plugin.options)
            if registry.ISOLATION in options:
                continue
            options.pop("sandbox", None)
            question = check_what_is_missing("environments", name, options, self._passed)
            for node, lines in (await self._cluster.ask(question, nodes)).items():
                faults += [f"node {node.title}: {name}: {line}" for line in lines]
        return faults

    async def sandboxes(self, nodes: Sequence[Node]) -> list[str]:
        """A sandbox of each environment that needs one starts on every node of env workers."""
        faults = []
        for env in self._run.envs:
            options, name = env.plugin.options, env.plugin.spec.id
            if registry.ISOLATION not in options and "sandbox" not in options:
                continue
            question = check_sandbox_on_node(name, options)
            for node, fault in (await self._cluster.ask(question, nodes, SANDBOX_S)).items():
                if fault is not None:
                    why, mend = fault
                    told = f": {mend}" if mend else ""
                    faults.append(f"node {node.title} has no sandbox for {name}: {why}{told}")
        return faults


def refuse(faults: Iterable[str]) -> None:
    """Raise a ConfigError with these lines, if there are any."""
    lines = list(faults)
    if lines:
        raise ConfigError("\n".join(lines))
