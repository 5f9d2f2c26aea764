"""The checks of parts that compute with torch: each is shown one that breaks exactly its rule."""

import pytest

from rollart_testing import (
    CheckOutcome,
    FakeAlgorithm,
    FakeWeightChannel,
    assert_checks,
    check_algorithm,
    check_weight_channel,
)


def failed(results):
    return [r.name for r in results if r.outcome is CheckOutcome.FAIL]


def test_check_algorithm():
    torch = pytest.importorskip("torch")
    assert_checks(check_algorithm(FakeAlgorithm(requires=["ref_logprobs"])))

    class Everywhere(FakeAlgorithm):
        def advantages(self, groups, signals):
            return [row + 1 for row in super().advantages(groups, signals)]

    class NoGradient(FakeAlgorithm):
        def loss(self, trainer_logprobs, batch):
            return torch.tensor(1.0), {}

    class Unmasked(FakeAlgorithm):
        def loss(self, trainer_logprobs, batch):
            return trainer_logprobs.mean(), {}

    class PerMicrobatch(FakeAlgorithm):
        def loss(self, trainer_logprobs, batch):
            gain = (trainer_logprobs * batch.advantages * batch.loss_mask).sum()
            return -gain / batch.loss_mask.sum(), {}

    class ByTrajectoryIds(FakeAlgorithm):
        """A mean over the tokens of each trajectory, of those that a microbatch holds."""

        def loss(self, trainer_logprobs, batch):
            zeros = torch.zeros(batch.total_trajectories)
            tokens = -(trainer_logprobs * batch.advantages * batch.loss_mask)
            sums = zeros.index_add(0, batch.trajectory_ids, tokens)
            counts = zeros.index_add(0, batch.trajectory_ids, batch.loss_mask.float())
            return (sums / counts.clamp(min=1)).sum() / batch.total_trajectories, {}

    class FlippedLoss(FakeAlgorithm):
        def loss(self, trainer_logprobs, batch):
            loss, metrics = super().loss(trainer_logprobs, batch)
            return -loss, metrics

    class FlippedAdvantages(FakeAlgorithm):
        def advantages(self, groups, signals):
            return [-row for row in super().advantages(groups, signals)]

    class FlippedDemonstrations(FakeAlgorithm):
        """What earns no matter what is likelier: it learns to avoid it."""

        def advantages(self, groups, signals):
            return [s.loss_mask.astype("float32") for g in groups for s in g.samples]

        def loss(self, trainer_logprobs, batch):
            loss, metrics = super().loss(trainer_logprobs, batch)
            return -loss, metrics

    class OneRowATrajectory(FakeAlgorithm):
        def advantages(self, groups, signals):
            rows = super().advantages(groups, signals)
            sizes = [len(t.samples) for g in groups for t in g.trajectories]
            return [rows[sum(sizes[:i])] for i in range(len(sizes))]

    assert failed(check_algorithm(PerMicrobatch())) == ["microbatches"]
    assert failed(check_algorithm(ByTrajectoryIds())) == ["microbatches"]
    assert failed(check_algorithm(FlippedLoss())) == ["direction"]
    assert failed(check_algorithm(FlippedAdvantages())) == ["direction"]
    assert failed(check_algorithm(FlippedDemonstrations())) == ["direction"]
    assert failed(check_algorithm(OneRowATrajectory())) == ["advantages"]
    assert "advantages" in failed(check_algorithm(Everywhere()))
    assert failed(check_algorithm(NoGradient())) == ["loss"]
    assert failed(check_algorithm(Unmasked())) == ["loss"]


def test_check_weight_channel():
    pytest.importorskip("torch")
    assert_checks(check_weight_channel(FakeWeightChannel))
    assert failed(check_weight_channel(lambda: FakeWeightChannel(keep=1))) == ["keeps_the_newest"]

    class Aliases(FakeWeightChannel):
        def publish(self, policy_version, tensors):
            tensors = list(tensors)
            publication = super().publish(policy_version, tensors)
            self._stores[self._location][policy_version] = tensors
            return publication

    class Sorts(FakeWeightChannel):
        def fetch(self, policy_version):
            return sorted(super().fetch(policy_version))

    class Hasty(FakeWeightChannel):
        def publish(self, policy_version, tensors):
            held = self._stores.setdefault(self._location, {}).setdefault(policy_version, [])
            for named in tensors:
                held.append(named)
            return super().publish(policy_version, held)

    class Hoards(FakeWeightChannel):
        def publish(self, policy_version, tensors):
            before = dict(self._stores.get(self._location, {}))
            publication = super().publish(policy_version, tensors)
            later = {v: t for v, t in before.items() if v > policy_version}
            self._stores[self._location].update(later)
            return publication

    assert failed(check_weight_channel(Hasty)) == ["failed_publication"]
    assert failed(check_weight_channel(Hoards)) == ["going_back"]
    assert failed(check_weight_channel(Aliases)) == ["what_is_published_is_fetched"]
    assert failed(check_weight_channel(Sorts)) == ["what_is_published_is_fetched"]
