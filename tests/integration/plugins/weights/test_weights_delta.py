"""The delta channel: what it saves, and what it does without the right base."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.weight_ends import end

from rollart_core.contracts.weights import WeightChannel
from rollart_plugins.weights.delta import ChecksumMismatch, Coding, DeltaChannel, decode, encode

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.int64, torch.uint8)


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    count=st.integers(0, 3000),
    share=st.sampled_from((0.0, 0.0004, 0.01, 0.3, 1.0)),
    step=st.sampled_from((1, 100, 200, 2**14, 2**31)),
    seed=st.integers(0, 2**16),
    compress=st.sampled_from(("auto", "always", "never")),
)
def test_every_change_comes_back_bit_for_bit(dtype, count, share, step, seed, compress):
    """Any bits: NaNs, infinities, signs, steps that wrap round."""
    rng = np.random.default_rng(seed)
    size = count * dtype.itemsize
    old = rng.integers(0, 256, size, np.uint8)
    new = old.copy()
    ints = new.view(f"i{dtype.itemsize}")
    where = rng.random(count) < share
    ints[where] += rng.integers(-step, step + 1, count).astype(ints.dtype)[where]
    block = np.frombuffer(encode(new, old, Coding("x", [count], compress)), np.uint8)
    base = old.copy()
    decode(block, base, base)
    assert (base == new).all()
    if size:
        base = old.copy()
        base[rng.integers(size)] ^= 1
        try:
            decode(block, base, base)
        except ChecksumMismatch:
            return
        assert (base == new).all(), "it was whole: the base did not matter"


@settings(max_examples=60, deadline=None)
@given(where=st.integers(0, 10**6), bit=st.integers(0, 7), whole=st.booleans())
def test_damage_anywhere_is_found_out_or_harmless(where, bit, whole):
    old = np.arange(2000, dtype=np.int16)
    new = old + (np.arange(2000) % 7 == 0)
    new = new.astype(np.int16)
    given = old.view(np.uint8)
    block = bytearray(encode(new.view(np.uint8), None if whole else given, Coding("x", [2000])))
    block[where % len(block)] ^= 1 << bit
    target = old.copy().view(np.uint8)
    try:
        decode(np.frombuffer(bytes(block), np.uint8), target, target)
    except ChecksumMismatch:
        return
    assert (target.view(np.int16) == new).all()


class Trained:
    """Weights in float32 that are trained a little, published in bfloat16."""

    def __init__(self, lr: float, size: int = 200_000) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.master = {n: self._draw(size) * 0.02 for n in ("a", "b")}
        self.lr = lr

    def _draw(self, size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator)

    def step(self) -> dict[str, torch.Tensor]:
        for master in self.master.values():
            master -= self.lr * self._draw(len(master)).sign()
        return self.published()

    def published(self) -> dict[str, torch.Tensor]:
        return {n: t.to(torch.bfloat16) for n, t in self.master.items()}


def assert_is(channel: WeightChannel, version: int, wanted: dict[str, torch.Tensor]) -> None:
    got = dict(channel.fetch(version))
    assert list(got) == list(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(got[name].view(torch.int16), tensor.view(torch.int16)), name


@pytest.fixture
def pair(tmp_path):
    made = []

    def make(**options):
        made.append([end("delta", tmp_path / "w", **options) for _ in range(2)])
        return made[-1]

    yield make
    for writer, reader in made:
        reader.close()
        writer.close()


def test_a_small_learning_rate_moves_little_and_ends_bit_equal(pair):
    writer, reader = pair()
    trained, moved = Trained(1e-6), []
    for version in range(5):
        weights = trained.step()
        publication = writer.publish(version, weights.items())
        moved.append(publication.moved_bytes / publication.num_bytes)
        assert_is(reader, version, weights)
    assert moved[0] > 0.9, "the first is whole"
    assert max(moved[1:]) < 0.1
    assert reader.moved_bytes == writer.moved_bytes


def test_it_is_whole_every_so_often(pair):
    writer, _ = pair(full_every=3)
    trained, whole = Trained(1e-6), []
    for version in range(7):
        publication = writer.publish(version, trained.step().items())
        whole.append(publication.moved_bytes > publication.num_bytes / 2)
    assert whole == [True, False, False, True, False, False, True]


def test_what_changes_altogether_is_sent_whole(pair):
    writer, reader = pair()
    for version in range(3):
        weights = {"w": torch.randn(50_000)}
        publication = writer.publish(version, weights.items())
        assert publication.moved_bytes < 1.01 * publication.num_bytes
        assert torch.equal(dict(reader.fetch(version))["w"], weights["w"])


@pytest.mark.parametrize("over", ["shared-memory", "disk"])
def test_late_and_sleepy_readers_catch_up(pair, over):
    """One that missed versions applies those; one without a base begins at the whole one."""
    writer, reader = pair(over=over, full_every=6)
    trained, known = Trained(1e-5), {}
    for version in range(11):
        known[version] = trained.step()
        writer.publish(version, known[version].items())
        if version in (1, 4, 5, 8):
            assert_is(reader, version, known[version])
    fetched = reader.moved_bytes
    assert_is(reader, 10, known[10])
    assert reader.moved_bytes - fetched < 2 * known[10]["a"].nbytes, "it had most of it"
    late = end("delta", writer_location(writer), over=over, full_every=6)
    assert_is(late, late.newest(), known[10])
    assert_is(late, 9, known[9])
    assert_is(late, 10, known[10])


def writer_location(channel: DeltaChannel) -> str:
    return str(channel._beneath._folder)


def test_a_base_that_was_damaged_is_made_anew(pair):
    writer, reader = pair()
    trained = Trained(1e-5)
    writer.publish(0, trained.step().items())
    list(reader.fetch(0))
    reader._base["b"][1234] = 3.0
    weights = trained.step()
    writer.publish(1, weights.items())
    assert_is(reader, 1, weights)


def test_an_interrupted_reader_does_not_trust_its_base(pair):
    writer, reader = pair()
    trained = Trained(1e-5)
    writer.publish(0, trained.step().items())
    list(reader.fetch(0))
    weights = trained.step()
    writer.publish(1, weights.items())
    half = iter(reader.fetch(1))
    next(half)
    half.close()
    assert_is(reader, 1, weights)


def test_damage_beneath_is_found_out_and_the_next_whole_one_heals(pair, tmp_path):
    writer, reader = pair(full_every=2)
    trained = Trained(1e-6)
    writer.publish(0, trained.step().items())
    list(reader.fetch(0))
    weights = trained.step()
    writer.publish(1, weights.items())
    (file,) = (tmp_path / "w").glob("v1-*.safetensors")
    data = bytearray(file.read_bytes())
    data[-len(data) // 3] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"weights of version 1 are damaged: '[ab]': it "):
        list(reader.fetch(1))
    weights = trained.step()
    writer.publish(2, weights.items())
    assert_is(reader, 2, weights)


def test_other_tensors_than_before(pair):
    writer, reader = pair()
    for version, tensors in enumerate(
        (
            {"a": torch.ones(4), "b": torch.ones(2, 2)},
            {"a": torch.ones(5), "c": torch.ones(3, dtype=torch.bfloat16)},
            {"a": torch.ones(5), "c": torch.zeros(3, dtype=torch.bfloat16)},
        )
    ):
        writer.publish(version, tensors.items())
        got = dict(reader.fetch(version))
        assert {n: t.tolist() for n, t in got.items()} == {
            n: t.tolist() for n, t in tensors.items()
        }


def test_what_another_channel_published_is_no_delta(tmp_path):
    plain, delta = end("shared-memory", tmp_path / "w"), end("delta", tmp_path / "w")
    plain.publish(1, [("w", torch.ones(2))])
    with pytest.raises(ValueError, match="not published by a delta channel"):
        delta.fetch(1)
    plain.close()


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ("nothing", "nothing"),
        ("delta", "is the delta channel itself"),
        ({"id": "disk", "keep": 3}, "over.keep has no effect"),
        ({"id": "disk", "bucket": 3}, "bucket"),
        ({"backend": "gloo"}, "over requires an id"),
    ],
)
def test_what_cannot_carry_it_is_refused(tmp_path, over, said):
    with pytest.raises(ValueError, match=said):
        end("delta", tmp_path, over=over)
