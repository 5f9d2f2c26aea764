"""Splits of a dataset: named, by a field, or by a hash; and the formats it may have."""

import csv
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from rollart_core.errors import UserError
from rollart_core.plugins import registry
from rollart_envs.questions.config import QuestionsConfig
from rollart_envs.questions.dataset import read_dataset, similar_questions


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows(begin, end):
    return [{"question": f"What is number {n}?", "answer": str(n)} for n in range(begin, end)]


def splits(**options):
    found = read_dataset(QuestionsConfig(**options)).splits
    return {split: {question.text for question in some} for split, some in found.items()}


def test_a_question_stays_in_its_split_when_rows_are_added(tmp_path):
    few = splits(file=write(tmp_path / "few.jsonl", rows(0, 1_000)))
    many = splits(file=write(tmp_path / "many.jsonl", rows(-500, 1_500)))
    assert all(few[split] <= many[split] for split in few)
    sizes = {split: len(some) / 2_000 for split, some in many.items()}
    assert sizes == pytest.approx(
        {"train": 0.75, "warm": 0.05, "validation": 0.1, "test": 0.1}, abs=0.025
    )
    other = splits(file=str(tmp_path / "few.jsonl"), split_seed=1)
    assert other["test"] != few["test"]


def test_repeated_questions_are_in_one_split(tmp_path):
    twice = [*rows(0, 300), *({**row, "question": row["question"].upper()} for row in rows(0, 300))]
    found = read_dataset(QuestionsConfig(file=write(tmp_path / "q.jsonl", twice))).splits
    keys = [{question.key for question in some} for some in found.values()]
    assert sum(map(len, keys)) == len(set.union(*keys)) == 300


def test_a_field_names_the_split_and_only_the_others_are_drawn(tmp_path):
    named = [{**row, "part": "dev"} for row in rows(0, 10)]
    found = splits(file=write(tmp_path / "q.jsonl", [*named, *rows(10, 500)]), split="part")
    assert len(found["validation"]) == 10
    assert all(found.values())


def test_files_of_a_folder_or_a_mapping_are_splits(tmp_path):
    write(tmp_path / "train.jsonl", rows(0, 400))
    with (tmp_path / "test.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(rows(400, 420))
    found = splits(file=str(tmp_path))
    assert found["test"] == {row["question"] for row in rows(400, 420)}
    paths = {"train": str(tmp_path / "train.jsonl"), "test": str(tmp_path / "test.csv")}
    assert splits(file=paths) == found


def test_a_question_in_two_splits_is_refused_or_dropped(tmp_path):
    write(tmp_path / "train.jsonl", rows(0, 100))
    write(tmp_path / "test.jsonl", rows(99, 120))
    reason = r"train\.jsonl, row 100 \(split train\): .*test\.jsonl, row 1 \(split test\)"
    with pytest.raises(UserError, match=reason) as caught:
        registry.make("questions", file=str(tmp_path))
    assert "\n" not in str(caught.value)
    dataset = read_dataset(QuestionsConfig(file=str(tmp_path), duplicates="drop"))
    assert len(dataset.splits["test"]) == 21
    assert dataset.notes == ("Dropped questions that are also in a held-out split: 1",)


def test_similar_questions_of_other_splits_are_reported(tmp_path):
    text = "Ann has {} red marbles and gives three of them to Ben before she buys twelve more blue"
    write(
        tmp_path / "train.jsonl",
        [
            {"question": f"{text.format(7)} marbles at the market on Sunday", "answer": "1"},
            {"question": "Is it 7?", "answer": "1"},
            {
                "question": "Something else that shares no words with any other",
                "answer": 2,
            },
        ],
    )
    write(
        tmp_path / "test.jsonl",
        [
            {"question": f"{text.format(7)} marbles at the market on Monday", "answer": "1"},
            {"question": "is it 7", "answer": "1"},
            {"question": "Is it 8?", "answer": "1"},
        ],
    )
    options = {"file": str(tmp_path), "shares": {"warm": 0, "validation": 0}}
    pairs = similar_questions(read_dataset(QuestionsConfig(**options)))
    assert {one.where.rpartition("row ")[2] for pair in pairs for one in pair} == {"1", "2"}
    (note,) = registry.make("questions", **options).notes()
    assert note.startswith("Questions that are similar to one of another split: 2 (")


def test_an_empty_split_says_how_to_fill_it(tmp_path):
    env = registry.make("questions", file=write(tmp_path / "q.jsonl", rows(0, 1)))
    with pytest.raises(UserError, match=r"'test' has no question.* 1: add rows.*shares\.test"):
        env.num_tasks("test")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("q.csv", "question,answer\na,1\nb\n", "row 2: .*does not have 2 values"),
        ("q.csv", 'question\n"a\n', "is no CSV"),
        ("q.parquet", "PAR1", "cannot be read as Parquet"),
        ("q.txt", "q", r"has to end in \.jsonl, \.parquet, \.csv"),
        ("q.jsonl", "", "has no rows"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, text, reason):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=rf"{name}.*{reason}"):
        registry.make("questions", file=str(tmp_path / name))


def test_a_folder_without_files_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no file that ends in"):
        registry.make("questions", file=str(tmp_path))


def test_a_hub_id_without_the_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"acme/sums: needs .*pip install 'rollart\[datasets\]'"):
        registry.make("questions", file="acme/sums")


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for ``datasets``: one dataset on the hub, or no network."""
    module = ModuleType("datasets")
    module.config = SimpleNamespace(HF_DATASETS_CACHE="/cache/hf")

    def load_dataset(source, subset):
        if source != "acme/sums":
            raise ConnectionError("no network")
        assert subset == "main"
        return {"train": rows(0, 400), "test": rows(400, 410), "extra": rows(0, 5)}

    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)


@pytest.mark.usefixtures("hub")
def test_splits_of_a_dataset_on_the_hub_are_used():
    dataset = read_dataset(QuestionsConfig(file="acme/sums", subset="main", split_seed=7))
    assert len(dataset.splits["test"]) == 10
    assert all(dataset.splits.values())
    assert dataset.notes == ("Ignored splits: extra",)


@pytest.mark.usefixtures("hub")
def test_a_hub_id_without_network_names_the_cache_and_how_to_fill_it():
    with pytest.raises(UserError) as caught:
        registry.make("questions", file="acme/other")
    said = str(caught.value)
    assert "/cache/hf (ConnectionError: no network)" in said
    assert 'load_dataset("acme/other")' in said
    assert "\n" not in said
