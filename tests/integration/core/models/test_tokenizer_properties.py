"""Any text comes back from a tokenizer, and encoding it by pieces changes nothing."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.chat_templates import tokenizer_with

from rollart_core.config.model import NewModel
from rollart_core.models.new import new_model, train_tokenizer
from rollart_core.models.tokenizer import load_tokenizer

PAGE = """Instruction: find a light blue shirt, size 12, for less than $40.99 [SEP] Back
[light blue]
[navy-blue][12 oz] [b07x1]"""
TEXTS = [PAGE] * 20 + ["click[light blue]", "search[blue shirt]", "é漢"]
SMALL = NewModel(num_layers=1, width=16, num_heads=2, head_dim=8, ffn_width=32, vocab_size=320)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 500)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_tokenizer(new_model(tmp_path_factory.mktemp("m"), SMALL, TEXTS, 0))


def ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x1f"), max_size=40)


@given(texts)
@settings(max_examples=80, deadline=None)
def test_every_text_comes_back(text):
    tokenizer = tokenizer_with("ours")
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x1f"), max_size=30))
@settings(max_examples=60, deadline=None)
@example("²0")
@example("é́ a_b  _ ٣½")
def test_all_text_comes_back(tokenizer, text):
    assert tokenizer.decode(ids(tokenizer, text)) == text


PARTS = ["a", "red", "b07x", "_", "4", " ", "  ", "\n", "[", "]", "[SEP]", "[A]", "[ab]", ". ", "-"]
PARTS += ["<|user|>", "<|", "|>", "\x1f", "é", "'s", "\t", "[A1]", "SEP]"]


@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join))
@settings(max_examples=150, deadline=None)
def test_encoding_by_pieces_changes_nothing(loaded, text):
    raw = loaded._encode._encode
    assert loaded.encode(text) == raw(text)
    assert loaded.encode(text + " ") == raw(text + " ")
