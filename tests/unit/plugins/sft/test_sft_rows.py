"""Rows of `rollart sft`: what each form becomes, what is refused, and which tokens are learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.chat_templates import tokenizer_with, write_tokenizer

from rollart_core.errors import UserError
from rollart_core.models.tokenizer import ChatTokenizer, byte_tokenizer, load_tokenizer
from rollart_core.types import Sample
from rollart_envs.questions.config import SHARES, QuestionsConfig
from rollart_envs.questions.dataset import read_dataset
from rollart_plugins.sft.config import SftConfig
from rollart_plugins.sft.rows import Demonstration, read_demonstrations, samples_of

ASKED = {"role": "user", "content": "What is 1 + 2?"}
SAID = {"role": "assistant", "content": "3"}
NO_SHARES = dict.fromkeys(SHARES, 0.0)
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def config_of(folder: Path, *rows: object, **changes: Any) -> SftConfig:
    file = folder / "rows.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    given = {"model": "m", "data": str(file), "shares": NO_SHARES, **changes}
    return SftConfig.model_validate(given)


def one_of(folder: Path, row: object, **changes: Any) -> Demonstration:
    (found,) = read_demonstrations(config_of(folder, row, **changes))["train"]
    return found


def learned(sample: Sample, tokenizer: ChatTokenizer) -> list[str]:
    """Return the texts of the runs of loss tokens."""
    marked = np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_mask.astype(int), [0]])))
    return [
        tokenizer.decode(sample.token_ids[start:stop].tolist())
        for start, stop in zip(marked[::2], marked[1::2], strict=True)
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, SAID]},
        {"messages": [ASKED, SAID], "tools": None, "reward": 1.0},
        {"messages": [{**ASKED, "content": [{"type": "text", "text": ASKED["content"]}]}, SAID]},
        {"messages": [ASKED, {**SAID, "tool_calls": None, "name": None}]},
        {"messages": [ASKED], "answer": "3"},
        {"prompt": ASKED["content"], "completion": "3"},
        {"prompt": [ASKED], "completion": [SAID]},
        {"question": ASKED["content"], "answer": 3},
        {"question": ASKED["content"], "solution": ["3", "three"]},
    ],
)
def test_every_form_of_a_row_gives_the_same_conversation(row: object, tmp_path: Path) -> None:
    assert one_of(tmp_path, row).messages == (ASKED, SAID)


def test_fields_and_a_text_before_the_question_can_be_named(tmp_path: Path) -> None:
    row = {"ask": "1 + 2", "say": "3", "question": "another", "answer": "none"}
    found = one_of(tmp_path, row, question="ask", answer="say", prompt="Add:")
    assert [m["content"] for m in found.messages] == ["Add:\n1 + 2", "3"]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{", "(the whole line)"),
        ({"text": "x"}, "'messages or prompt or question': is missing; the fields are text"),
        ({"questions": "x"}, "Did you mean"),
        ({"question": "x"}, "'completion or answer or .*': is missing, and the row has no message"),
        ({"messages": [ASKED]}, "has no message of the assistant"),
        ({"messages": []}, r"is \[\]; it must be a text or a list of messages, not empty"),
        ({"messages": [SAID]}, "begins with a message of the assistant"),
        ({"messages": [{"role": "robot", "content": ""}, SAID]}, "role must be one of system"),
        (
            {"messages": [ASKED, {"role": "assistant", "content": None}]},
            "None, which is not a text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, SAID]},
            "has content of type 'image_url'; text models read only text",
        ),
        ({"messages": [ASKED, {**SAID, "tool_calls": [{"name": "f"}]}]}, "names no function"),
        ({"messages": [ASKED, SAID], "tools": [{"name": "f"}]}, "'tools': a tool must be"),
        ({"messages": [ASKED, SAID], "tools": "{"}, "'tools': "),
    ],
)
def test_a_bad_row_is_named_with_its_file_line_and_field(
    row: object, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=rf"rows.jsonl, row 2: .*{problem}") as caught:
        read_demonstrations(config_of(tmp_path, {"messages": [ASKED, SAID]}, row))
    assert "\n" not in str(caught.value)


def test_files_without_rows_to_train_on_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no row to train on \(no rows\)"):
        read_demonstrations(config_of(tmp_path, ""))
    test_only = {"messages": [ASKED, SAID], "split": "test"}
    with pytest.raises(UserError, match=r"has no row to train on \(1 of test\)"):
        read_demonstrations(config_of(tmp_path, test_only))
    missing = SftConfig.model_validate({"model": "m", "data": str(tmp_path / "none.jsonl")})
    with pytest.raises(UserError, match="there is no such file"):
        read_demonstrations(missing)


def test_a_question_is_in_one_split_whatever_its_answer_or_its_line(tmp_path: Path) -> None:
    rows = [{"question": f"How much is {n % 300}?", "answer": str(n)} for n in range(900)]
    splits = read_demonstrations(config_of(tmp_path, *rows, shares={"validation": 0.2}))
    held_out = {one.key for one in splits["validation"]}
    assert 30 < len(held_out) < 90
    assert len(splits["validation"]) == 3 * len(held_out)
    assert held_out.isdisjoint(one.key for one in splits["train"])
    again = read_demonstrations(config_of(tmp_path, *rows[::-1], shares={"validation": 0.2}))
    assert {one.key for one in again["validation"]} == held_out
    other = {"shares": {"validation": 0.2}, "split_seed": 1}
    others = read_demonstrations(config_of(tmp_path, *rows, **other))
    assert {one.key for one in others["validation"]} != held_out


@pytest.mark.parametrize("shares", [{}, {"validation": 0.2}], ids=["default", "one given"])
def test_rl_on_the_same_file_has_the_same_splits(shares: dict[str, float], tmp_path: Path) -> None:
    rows = [{"question": f"How much is  {n}?", "answer": str(n)} for n in range(300)]
    config = config_of(tmp_path, *rows, shares=shares, prompt="Brief:")
    env = {"file": config.data[0], "shares": shares, "prompt": "Brief:"}
    questions = read_dataset(QuestionsConfig.model_validate(env)).splits
    splits = read_demonstrations(config)
    assert {split: [one.key for one in found] for split, found in splits.items()} == {
        split: [question.key for question in found] for split, found in questions.items()
    }
    assert all(splits.values())


def test_a_preset_reads_the_solutions_of_a_dataset(tmp_path: Path) -> None:
    row = {"question": "1 + 2?", "answer": "1 and 2 is 3.\n#### 3"}
    asked, said = one_of(tmp_path, row, preset="gsm8k").messages
    assert asked["content"].endswith("\n1 + 2?")
    assert len(asked["content"]) > len("\n1 + 2?")
    assert said["content"] == row["answer"]
    with pytest.raises(UserError, match="row 1: field 'answer'"):
        one_of(tmp_path, {"question": "1 + 2?", "answer": "3"}, preset="gsm8k")


def test_csv_files_and_folders_are_read_and_splits_of_a_folder_keep_their_names(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.csv").write_text("question,answer\n1 + 2?,3\n")
    (tmp_path / "val.csv").write_text("question,answer\n1 + 3?,4\n")
    (tmp_path / "other.csv").write_text("question,answer\n1 + 4?,5\n")
    given = {"model": "m", "data": str(tmp_path), "shares": NO_SHARES}
    splits = read_demonstrations(SftConfig.model_validate(given))
    assert [m["content"] for m in splits["train"][0].messages] == ["1 + 2?", "3"]
    assert {split: len(found) for split, found in splits.items() if found} == {
        **{"train": 1, "validation": 1}
    }
    (tmp_path / "train.csv").unlink()
    with pytest.raises(UserError, match=r"\(1 of validation, other splits: other\)"):
        read_demonstrations(SftConfig.model_validate(given))


def test_a_split_that_rows_name_is_not_drawn(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "answer": "a"} for n in range(200)]
    rows += [{"question": f"{n}!", "answer": "a", "split": "dev"} for n in range(3)]
    rows += [{"question": "x", "answer": "a", "split": "hard"}]
    splits = read_demonstrations(config_of(tmp_path, *rows, shares=NO_SHARES | {"validation": 0.5}))
    assert {split: len(found) for split, found in splits.items()} == {
        **{"train": 201, "warm": 0, "validation": 3, "test": 0},
    }


@pytest.mark.parametrize("name", ["ours", "chatml", "trims"])
def test_only_answers_and_their_ends_are_learned_in_every_turn(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_with(name)
    talk = [
        {"role": "system", "content": "be brief"},
        *(ASKED, SAID),
        *({"role": "user", "content": "and 2 more?"}, {"role": "assistant", "content": "red 5"}),
        {"role": "user", "content": "thanks"},
    ]
    (sample,) = samples_of(one_of(tmp_path, {"messages": talk}), tokenizer)
    assert learned(sample, tokenizer) == [
        f"3{tokenizer.stop_texts[0]}",
        f"red 5{tokenizer.stop_texts[0]}",
    ]
    whole = tokenizer.encode(tokenizer.render(talk[:-1]))  # type: ignore[arg-type]
    assert sample.token_ids.tolist() == whole[: sample.num_tokens]


def test_answers_with_weight_0_are_read_and_not_learned(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    bad = {"role": "assistant", "content": "4", "weight": 0}
    again = {"role": "user", "content": "Really?"}
    row = {"messages": [ASKED, bad, again, {**SAID, "weight": 1}]}
    (sample,) = samples_of(one_of(tmp_path, row), tokenizer)
    assert learned(sample, tokenizer) == [f"3{tokenizer.stop_texts[0]}"]
    assert "4" in tokenizer.decode(sample.token_ids.tolist())


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_tool_calls_are_learned_as_the_policy_writes_them(
    arguments: object, tmp_path: Path
) -> None:
    tokenizer = byte_tokenizer()
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    talk = [
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        SAID,
    ]
    for tools in ([TOOL], json.dumps([TOOL])):
        (sample,) = samples_of(one_of(tmp_path, {"messages": talk, "tools": tools}), tokenizer)
        written = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        assert learned(sample, tokenizer) == [
            f"{written}{tokenizer.stop_texts[0]}",
            f"3{tokenizer.stop_texts[0]}",
        ]
        text = tokenizer.decode(sample.token_ids.tolist())
        assert '"description": "Add."' in text
        assert "<tool_response>3" in text


def test_tools_that_the_template_does_not_know_are_refused(tmp_path: Path) -> None:
    one = one_of(tmp_path, {"messages": [ASKED, SAID], "tools": [TOOL]})
    with pytest.raises(UserError, match=r"rows.jsonl, row 1: there are tools, but .* template"):
        samples_of(one, tokenizer_with("ours"))


def test_a_conversation_that_the_template_rewrites_gives_several_samples(tmp_path: Path) -> None:
    tokenizer = tokenizer_with("forgets_thinking")
    first = {"role": "assistant", "content": "<think>hm</think>red"}
    talk = [ASKED, first, {"role": "user", "content": "ok"}, SAID]
    samples = samples_of(one_of(tmp_path, {"messages": talk}), tokenizer)
    texts = [text for sample in samples for text in learned(sample, tokenizer)]
    assert texts == ["<think>hm</think>red<|im_end|>", "3<|im_end|>"]
    assert len(samples) == 2


def test_reasoning_is_learned_where_the_template_writes_it(
    tmp_path: Path, shared_dir: Path
) -> None:
    template = (shared_dir / "data/chat_templates/qwen3.jinja").read_text(encoding="utf-8")
    backend = json.loads((_saved("chatml", tmp_path) / "tokenizer.json").read_text())
    write_tokenizer(tmp_path, json.dumps(backend), template, "<|im_end|>")
    tokenizer = load_tokenizer(tmp_path)
    said = {**SAID, "reasoning_content": "one and two"}
    (sample,) = samples_of(one_of(tmp_path, {"messages": [ASKED, said]}), tokenizer)
    assert learned(sample, tokenizer) == ["<think>\none and two\n</think>\n\n3<|im_end|>"]


def _saved(name: str, folder: Path) -> Path:
    from support.chat_templates import SPECIALS, TEMPLATES, TEXTS

    from rollart_core.models.new import train_tokenizer

    backend = train_tokenizer(TEXTS, 400)
    backend.add_special_tokens(SPECIALS)
    template, stop = TEMPLATES[name]
    return write_tokenizer(folder, backend.to_str(), template, stop)
