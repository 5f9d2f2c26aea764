"""What must hold on the nodes of a cluster before a run starts on them.

Takes: a run, and the nodes its parts will be on. Gives: what is missing, a line each that names the
node and how to mend it. Never: changes a node, but for a file that it writes and removes.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rollart_core.config.model import ModelPath
from rollart_core.config.resolve import ResolvedRun
from rollart_core.errors import ConfigError
from rollart_core.plugins import registry
from rollart_ray import nodes as ray_nodes
from rollart_ray.cluster import RayCluster
from rollart_ray.pools import Node

BOX_S = 240.0
"""To start one box on a node, its image being there."""
Nodes = Mapping[str, Sequence[Node]]
"""Role -> the node of each of its parts."""


class NodeChecks:
    """The checks; each returns a line for each node that lacks something."""

    def __init__(self, run: ResolvedRun, run_dir: Path, cluster: RayCluster) -> None:
        """Bind a run to its cluster."""
        self._run = run
        self._run_dir = run_dir
        self._cluster = cluster

    async def versions(self, nodes: Sequence[Node]) -> list[str]:
        """Every node has this process's Python, Ray, RollArt and plugins."""
        names = {p.distribution for p in self._run.plugins} | {"rollart", "ray"}
        here = ray_nodes.versions(sorted(names))
        here = {name: found for name, found in here.items() if found != ray_nodes.MISSING}
        answers = await self._cluster.ask(ray_nodes.ask_versions(sorted(names)), nodes)
        theirs = {node.title: found for node, found in answers.items()}
        return ray_nodes.differences(here, theirs)

    async def parts(self, nodes: Nodes, classes: Sequence[str], shared: Path) -> list[str]:
        """Return all that parts need and their nodes lack.

        Args:
            nodes: Where they will be.
            classes: The pool of each engine.
            shared: The folder that trainer and engines are to share.
        """
        return [
            *await self.files(nodes),
            *await self.weights(nodes, shared),
            *await self.engines(classes, nodes["engine"]),
            *await self.environments(nodes["env"]),
            *await self.boxes(nodes["env"]),
        ]

    async def files(self, nodes: Nodes) -> list[str]:
        """Who reads or writes the run directory can; a model's folder is where it is read."""
        computing, faults = [*nodes["trainer"], *nodes["engine"]], []
        model = self._run.config.model
        if not isinstance(model, ModelPath):
            computing.append(nodes["env"][0])  # makes it
        elif Path(model.path).is_dir():
            there = await self._cluster.ask(ray_nodes.ask_whether_there(model.path), computing)
            faults = [
                f"node {node.title} has no {model.path}: put the model on a file system that all "
                "nodes share, or at the same path everywhere, or name it by its hub id"
                for node, found in there.items()
                if not found
            ]
        probe, text = self._run_dir / ".seen", secrets.token_hex(8)
        probe.write_text(text, encoding="utf-8")
        try:
            seen = await self._cluster.ask(ray_nodes.ask_whether_seen(str(probe), text), computing)
        finally:
            probe.unlink()
        return faults + [
            f"node {node.title} does not see {self._run_dir}: set runs_dir to a folder on a file "
            "system that all nodes share (model, checkpoints and logs go there)"
            for node, found in seen.items()
            if not found
        ]

    async def weights(self, nodes: Nodes, shared: Path) -> list[str]:
        """The engines see what the trainer writes, where the channel needs that."""
        if self._run.weights.spec.reach != "machine":
            return []
        trainer, engines = nodes["trainer"][0], nodes["engine"]
        probe, text = str(shared / ".seen"), secrets.token_hex(8)
        wrong = (await self._cluster.ask(ray_nodes.ask_to_write(probe, text), [trainer]))[trainer]
        seen = await self._cluster.ask(ray_nodes.ask_whether_seen(probe, text), engines)
        await self._cluster.ask(ray_nodes.ask_to_remove(probe), [trainer])
        if wrong:
            return [f"node {trainer.title} cannot write to {shared}: {wrong}"]
        return [
            f"node {node.title} does not share its memory with {trainer.title}, where the trainer "
            f"is: weights: {self._run.config.weights.id} works on one machine; take weights: "
            "collective, or disk with runs_dir on a file system that all nodes share"
            for node, found in seen.items()
            if not found
        ]

    async def engines(self, classes: Sequence[str], nodes: Sequence[Node]) -> list[str]:
        """Every node of an engine has what the options of its class name."""
        faults = []
        for pool in dict.fromkeys(classes):
            engine = self._run.engine_on(pool)
            here = [node for name, node in zip(classes, nodes, strict=True) if name == pool]
            question = ray_nodes.check_what_is_missing(
                "inference_engines", engine.spec.id, engine.options
            )
            for node, lines in (await self._cluster.ask(question, here)).items():
                faults += [f"node {node.title}: engine {engine.spec.id}: {line}" for line in lines]
        return faults

    async def environments(self, nodes: Sequence[Node]) -> list[str]:
        """Every node of env workers has what the options of each environment name.

        Of a box they name no file here; whether one comes up is a question of its own.
        """
        faults = []
        for env in self._run.envs:
            name, options = env.plugin.spec.id, dict(env.plugin.options)
            if registry.ISOLATION in options:
                continue
            options.pop("sandbox", None)
            question = ray_nodes.check_what_is_missing("environments", name, options)
            for node, lines in (await self._cluster.ask(question, nodes)).items():
                faults += [f"node {node.title}: {name}: {line}" for line in lines]
        return faults

    async def boxes(self, nodes: Sequence[Node]) -> list[str]:
        """On every node of env workers, a box of each environment that needs one comes up."""
        faults = []
        for env in self._run.envs:
            options, name = env.plugin.options, env.plugin.spec.id
            if registry.ISOLATION not in options and "sandbox" not in options:
                continue
            question = ray_nodes.check_sandbox_on_node(name, options)
            for node, fault in (await self._cluster.ask(question, nodes, BOX_S)).items():
                if fault is not None:
                    why, mend = fault
                    told = f": {mend}" if mend else ""
                    faults.append(f"node {node.title} has no box for {name}: {why}{told}")
        return faults


def refuse(faults: Iterable[str]) -> None:
    """Raise a ConfigError with these lines, if there is one."""
    lines = list(faults)
    if lines:
        raise ConfigError("\n".join(lines))
