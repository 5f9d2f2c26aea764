import pytest

from rollart_core.spaces import Messages, Text


def test_text_holds_any_unicode_but_no_lone_surrogates():
    space = Text()
    for text in ("", "two words\n", "größer 雪 😀", "\x00"):
        assert text in space
    for other in (b"bytes", None, 3, "\ud800"):
        assert other not in space


def test_text_counts_characters():
    assert "雪雪" in Text(2)
    assert "abc" not in Text(2)


@pytest.mark.parametrize("make", [Text, Messages])
def test_samples_are_seeded_and_belong(make):
    first, second, other = make(seed=3), make(seed=3), make(seed=4)
    samples = [first.sample() for _ in range(50)]
    assert samples == [second.sample() for _ in range(50)]
    assert samples != [other.sample() for _ in range(50)]
    assert all(sample in first for sample in samples)
    assert len({str(sample) for sample in samples}) > 40


def test_messages_want_role_and_content():
    space = Messages(2, max_length=5)
    good = {"role": "user", "content": "hi"}
    assert [good] in space
    assert [] in space
    assert [{"role": "tool", "content": "3", "tool_call_id": "a", "name": "add"}] in space
    for bad in (
        good,
        [good] * 3,
        [{"role": "user"}],
        [{**good, "names": "x"}],
        [{**good, "tool_call_id": 1}],
        [{"role": "user", "content": "longer"}],
        [{"role": 1, "content": ""}],
    ):
        assert bad not in space


def test_equality_and_repr():
    assert Text(3) == Text(3) != Text()
    assert Messages(3) == Messages(3) != Messages(3, max_length=2)
    assert Text(3) != Messages(3)
    assert (repr(Text(3)), repr(Text())) == ("Text(3)", "Text()")
    assert repr(Messages(2)) == "Messages(2, max_length=None)"


def test_masks_are_refused():
    with pytest.raises(ValueError, match="no mask"):
        Text().sample(mask=[1])
