"""A neural bandit: four contexts, four arms, a small network, and any of our algorithms.

In each context one arm pays 1 with a chance of 0.8, another pays 0.5 for certain, two pay nothing.
The best policy has a mean reward of 0.8; one that takes the certain arm everywhere has 0.5.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import numpy as np
import torch

from rollart_core.contracts.algorithm import Algorithm
from rollart_core.plugins.manifest import read_manifest
from rollart_core.training import batch as batches
from rollart_core.training.loss import loss_batch, spread
from rollart_core.types import Group, Sample, Ticket, Trajectory, Turn
from support.algorithm_cases import TASK

NUM_CONTEXTS = NUM_ARMS = 4
BEST, CERTAIN = 0.8, 0.5
PAYS = np.zeros((NUM_CONTEXTS, NUM_ARMS))
for context in range(NUM_CONTEXTS):
    PAYS[context, context] = BEST
    PAYS[context, (context + 1) % NUM_ARMS] = CERTAIN
MASK = np.array([False, True])
BEFORE, SAMPLED = np.array([-1, 0], dtype=np.int32), np.array([-1, 0], dtype=np.int32)
ENTRY_POINTS = {
    spec.alias: spec.entry_point for spec in read_manifest("rollart_algorithms").specs["algorithms"]
}


@dataclass(frozen=True)
class Setting:
    """How one run learns."""

    lr: float
    num_updates: int
    groups_per_batch: int = 2
    group_size: int = 4


def make(alias: str, **options: object) -> Algorithm:
    """Return an algorithm, with those of the options that it has."""
    module, _, name = ENTRY_POINTS[alias].partition(":")
    cls = getattr(importlib.import_module(module), name)
    known = set(cls.config_class.model_fields)
    if cls.config_class().model_dump().get("normalise", "none") == "none":
        known -= {"std_floor"}
    made = cls(**{key: value for key, value in options.items() if key in known})
    assert isinstance(made, Algorithm)
    return made


def learn(algorithm: Algorithm, setting: Setting, seed: int) -> float:
    """Return the mean reward of the policy after so many updates, from an even start."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    network = torch.nn.Sequential(
        torch.nn.Linear(NUM_CONTEXTS, 32), torch.nn.Tanh(), torch.nn.Linear(32, NUM_ARMS)
    )
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=setting.lr, betas=(0.9, 0.95), weight_decay=0.0
    )
    for _ in range(setting.num_updates):
        optimizer.zero_grad()
        groups = _groups(_probabilities(network), setting, random)
        loss = _loss(algorithm, network, groups)
        if loss is not None:
            loss.backward()
            optimizer.step()
    return float((_probabilities(network) * PAYS).sum(1).mean())


def _probabilities(network: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        logits = network(torch.eye(NUM_CONTEXTS)).double()
    return torch.softmax(logits, 1).numpy()


def _groups(
    probabilities: np.ndarray, setting: Setting, random: np.random.Generator
) -> list[Group]:
    groups = []
    for g in range(setting.groups_per_batch):
        context = int(random.integers(NUM_CONTEXTS))
        chances = probabilities[context]
        arms = random.choice(NUM_ARMS, size=setting.group_size, p=chances)
        members = []
        for i, arm in enumerate(arms):
            pays = PAYS[context, arm]
            reward = float(random.random() < BEST) if pays == BEST else float(pays)
            row = np.array([context, arm], dtype=np.int32)
            logprobs = np.array([0.0, np.log(chances[arm])], dtype=np.float32)
            turn = Turn(f"context {context}", "pull", 1, 1, "stop", reward, 0.0, 0.0)
            sample = Sample(row, MASK, logprobs, SAMPLED, BEFORE)
            ticket = Ticket(f"g{g}.{i}", TASK, f"g{g}", i)
            members.append(
                Trajectory(ticket, "finished", (sample,), (turn,), reward=reward, score=reward)
            )
        groups.append(Group(f"g{g}", TASK, tuple(members), len(members)))
    return groups


def _loss(
    algorithm: Algorithm, network: torch.nn.Module, groups: list[Group]
) -> torch.Tensor | None:
    """Return the loss as the trainer takes it; None where nothing is learned."""
    samples = [s for g in groups for s in g.samples]
    rows = batches.make_rows(groups, algorithm.advantages(groups, {}), 0)
    for name, values in algorithm.targets(groups, {}).items():
        batches.attach(name, rows, samples, values)
    (minibatch,) = batches.split(
        rows, 1, algorithm.zero_advantage, min_effective_groups=algorithm.min_effective_groups
    )
    if not minibatch.rows:
        return None
    part = loss_batch(minibatch, range(len(minibatch.rows)), 0, torch.device("cpu"))
    tokens = torch.from_numpy(np.stack([r.sample.token_ids for r in minibatch.rows])).long()
    table = network(torch.eye(NUM_CONTEXTS))[tokens[:, 0]].log_softmax(1)
    logprobs = spread(table.gather(1, tokens[:, 1:]).squeeze(1), part.loss_mask)
    part.outputs = {"entropy": spread(-(table.exp() * table).sum(1), part.loss_mask)}
    if "proximal_logprobs" in algorithm.requires:
        part.signals = {**part.signals, "proximal_logprobs": logprobs.detach()}
    loss, _ = algorithm.loss(logprobs, part)
    return loss * minibatch.loss_scale
