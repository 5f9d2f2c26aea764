import json

import pytest
from support.chat_templates import CHATML, TEXTS, tokenizer_with, write_tokenizer

from rollart_core.errors import ConfigError
from rollart_core.models.chat_template import ChatTemplate, TemplateRefusal, fold
from rollart_core.models.new import train_tokenizer
from rollart_core.models.tokenizer import load_tokenizer
from rollart_core.types import Message


def test_nothing_is_added_and_special_tokens_are_recognised():
    tokenizer = tokenizer_with("ours")
    (end,) = tokenizer.encode("<|end|>")
    assert end in tokenizer.stop_token_ids
    assert tokenizer.decode([*tokenizer.encode("red"), end], skip_special_tokens=True) == "red"


def test_what_encode_returns_is_the_callers_own():
    tokenizer = tokenizer_with("ours")
    tokenizer.encode("red").append(7)
    assert 7 not in tokenizer.encode("red")


def test_stop_tokens_come_from_tokenizer_and_generation_config(tmp_path):
    backend = train_tokenizer(TEXTS, 300)
    write_tokenizer(tmp_path, backend.to_str(), CHATML, "<|end|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))
    assert load_tokenizer(tmp_path).stop_token_ids == (1, 0)


def test_the_template_of_the_tokenizer_config_is_used(tmp_path):
    write_tokenizer(tmp_path, train_tokenizer(TEXTS, 300).to_str(), None, "<|end|>")
    several = [{"name": "tool", "template": "x"}, {"name": "default", "template": CHATML}]
    config = {"eos_token": "<|end|>", "chat_template": several}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).template.source == CHATML


def test_the_fingerprint_notifies_tokenizers_apart(tmp_path):
    same, other = tokenizer_with("ours"), tokenizer_with("chatml")
    assert same.fingerprint != other.fingerprint
    write_tokenizer(tmp_path, train_tokenizer(TEXTS, 300).to_str(), CHATML, "<|end|>")
    assert load_tokenizer(tmp_path).fingerprint == load_tokenizer(tmp_path).fingerprint


def test_bad_paths_are_told_in_one_line(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    backend = train_tokenizer(TEXTS, 300).to_str()
    cases = {
        tmp_path: "not a model folder",
        file: "not a model folder",
        tmp_path / "none": "there is no folder",
        write_tokenizer(_made(tmp_path / "a"), "{}", CHATML, "<|end|>"): "tokenizer.json",
        write_tokenizer(_made(tmp_path / "b"), backend, None, "<|end|>"): "no chat template",
        write_tokenizer(_made(tmp_path / "c"), backend, "{% if %}", "<|end|>"): "not a valid Jinja",
        write_tokenizer(_made(tmp_path / "d"), backend, CHATML, "<|nope|>"): "has no eos_token",
    }
    for path, message in cases.items():
        with pytest.raises(ConfigError, match=message) as caught:
            load_tokenizer(path)
        assert "\n" not in str(caught.value)


def _made(folder):
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("source", "is_plain"),
    [
        (CHATML, True),
        ("{% for m in messages %}{{ m.role }}:{{ m['content'] }}{% endfor %}", True),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", True),
        ("{{ messages[0].content }}", True),
        ("{% for m in messages %}{{ m.content | trim }}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content.split('x')[0] }}{% endfor %}", False),
        ("{% for m in messages %}{% if m.content %}{{ m.content }}{% endif %}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content == 'x' }}{% endfor %}", False),
        ("{% for m in messages %}{{ m }}{% endfor %}", False),
        ("{% for m in messages %}{{ m[key] }}{% endfor %}", False),
        ("{{ messages }}", False),
        ("{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}", False),
        ("{% set x = messages[0].content %}{{ x }}", False),
        ("{% for m in messages %}{{ m.content[0] }}{% endfor %}", False),
        ("{{ strftime_now('%Y') }}", False),
    ],
)
def test_plain_templates_are_told_from_those_that_look_at_contents(source, is_plain):
    assert ChatTemplate(source, {}).is_plain is is_plain


@pytest.mark.parametrize(
    "body",
    [
        "{% if loop.last %}{{ m.content }}{% endif %}",
        "{% if loop.last %}newest: {% endif %}{{ m.content }}",
    ],
)
def test_a_plain_template_that_rewrites_what_was_does_not_append(body):
    source = "{% for m in messages %}" + body + "{% endfor %}"
    assert ChatTemplate(source, {}).is_plain
    talk = [
        Message(role=r, content=c) for r, c in [("user", "a"), ("assistant", "b"), ("user", "c")]
    ]
    assert ChatTemplate(source, {}).continuation("", talk, 1) is None


def test_generation_tags_of_transformers_do_nothing():
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert ChatTemplate(source, {}).render([Message(role="user", content="a")]) == "a"


def test_a_refusal_says_what_the_template_says():
    with pytest.raises(TemplateRefusal, match="no, thanks"):
        ChatTemplate("{{ raise_exception('no, thanks') }}", {}).render([])


def test_fold_joins_all_that_is_not_the_policys():
    roles = ["system", "user", "assistant", "tool", "user"]
    folded = fold([Message(role=r, content=str(i)) for i, r in enumerate(roles)])
    assert [(m["role"], m["content"]) for m in folded] == [
        ("user", "0\n\n1"),
        ("assistant", "2"),
        ("user", "3\n\n4"),
    ]
