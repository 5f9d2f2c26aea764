"""`rollart plan`, from a config and a cluster file to a table, one object, or one line of error."""

import json

import pytest
from support.chat_templates import TEMPLATES, write_tokenizer

from rollart_core.cli import main

CONFIG = """
model: {kind: new}
env: frozenlake
stop: {batches: 1}
"""
ONE = "pools:\n  - {name: local, device: cpu, count: 4}\n"


@pytest.fixture
def rollart(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)

    def call(cluster, *arguments):
        (tmp_path / "cluster.yaml").write_text(cluster)
        argv = ["rollart", "plan", "run.yaml", "--cluster", "cluster.yaml", *arguments]
        monkeypatch.setattr("sys.argv", argv)
        with pytest.raises(SystemExit) as e:
            main()
        said = capsys.readouterr()
        return e.value.code or 0, said.out, said.err

    return call


def test_one_object(rollart):
    code, out, _ = rollart(TWO, "--json", "--mapper", "colocate")
    said = json.loads(out)
    assert code == 0
    assert said["mapper"] == "colocate"
    own = json.loads(rollart(TWO, "--json")[1])
    assert (own["mapper"], own["envs"]) == ("affinity", {"toy/FrozenLake-v1": "cpus"})
    assert said["reasons"] != own["reasons"]
    assert said["expected"]["trajectories_per_s"] > 0
    assert list(said["compared"]) == ["colocate", "affinity"]


@pytest.fixture
def thinking_model(tmp_path):
    """Return a model whose chat template removes the thoughts before the last user message."""
    (tmp_path / "m").mkdir()
    folder = write_tokenizer(tmp_path / "m", "{}", TEMPLATES["thinks"][0], "<|im_end|>")
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"intermediate_size": 64, "vocab_size": 100}
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def test_rows_that_the_chat_template_makes_are_counted(rollart, thinking_model):
    asked = ("model=m", "rollout.observation_role=user")
    _, out, _ = rollart(TWO, *asked)
    assert " rows a trajectory: the chat template removes earlier thoughts" in out
    rows = []
    for more in ((), ("rollout.keep_thinking=true",)):
        said = json.loads(rollart(TWO, *asked, *more, "--json")[1])
        rows += said["rows"].values()
    assert rows[0] > rows[1] == 1


def test_a_person_reads_where_why_and_how_fast(rollart):
    code, out, _ = rollart(TWO, "--mapper", "colocate")
    assert code == 0
    for words in ("trajectories/s", "Limited by", "Compared"):
        assert words in out
    assert out.startswith("colocate: ")
    own = rollart(TWO)[1]
    assert own.startswith("affinity: ")
    assert "environments run on cpus" in own


@pytest.mark.parametrize(
    ("cluster", "arguments", "says"),
    [
        ("pools:\n  - {name: a, device: H100, count: 0}\n", (), "cluster.yaml:2: pools.0.count"),
        (
            "pools:\n  - {name: a, device: H100, count: 2}\n  - {name: b, device: L4, count: 2}\n",
            (),
            "no pool may run environments",
        ),
        (ONE, ("--mapper", "affinty"), "Did you mean"),
        (CONFIG, (), "cluster.yaml: looks like a run config, not a cluster file"),
        (ONE, ("model=Nobody/None-7B",), "set model.shape in the config, or model in the cluster"),
        (
            "pools:\n  - {name: a, device: H100, count: 2}\n  - {name: c, device: cpu, count: 2}\n",
            ("runtime.num_trainer_ranks=4",),
            "the trainer needs 4 devices of one pool, but a has 2",
        ),
        (
            ONE,
            ("mapper={id: static, trainer: mars}",),
            "trainer: there is no pool 'mars' with a device. Known: local",
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_line(rollart, cluster, arguments, says):
    code, out, err = rollart(cluster, *arguments)
    assert (code, out) == (1, "")
    assert says in err
    assert len(err.splitlines()) == 1


TWO = """
pools:
  - {name: h100, device: H100, count: 4}
  - {name: h20, device: H20, count: 4}
  - {name: cpus, device: cpu, count: 64}
"""
