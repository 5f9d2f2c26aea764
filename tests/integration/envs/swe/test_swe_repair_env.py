"""``swe/Repair-v1`` in a box: tools, submitting, grading, and what an agent may leave behind."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from support.sandbox_types import no_bubblewrap
from support.swe_repositories import git, shapes_task

from rollart_core.errors import ConfigError, SandboxFailure
from rollart_core.rollout import loop
from rollart_core.rollout.tools import Call, ToolAction
from rollart_envs.swe.repair_env import RepairEnv
from rollart_envs.swe.repair_episode import expert_actions
from rollart_envs.swe.repository import RepositoryTree, TaskFailure, base_tree
from rollart_envs.swe.task import repair_task
from rollart_envs.swe.tools import Bash, parse_action
from rollart_envs.swe.workspace import needs_of, unpack

ISOLATIONS = {"process": {"id": "process", "trusted": True}, "bubblewrap": {"id": "bubblewrap"}}


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        row = shapes_task(path / "repos")
        lost = {**row, "instance_id": "lost", "base_commit": "0123456789"}
        gone = {**row, "instance_id": "gone", "repo": "acme/gone"}
        open_quote = {**row, "instance_id": "quote", "test_command": "pytest -k 'a"}
        rows = [row, lost, gone, open_quote]
        (path / "tasks.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        yield path


@pytest.fixture(scope="module", params=ISOLATIONS)
def env(request, folder):
    if request.param == "bubblewrap" and (why := no_bubblewrap()):
        pytest.skip(why)
    made = RepairEnv(
        sandbox=ISOLATIONS[request.param],
        tasks=folder / "tasks.jsonl",
        command_timeout_s=60,
        max_turns=8,
        max_output_chars=2000,
    )
    yield made
    made.close()


def begun(env):
    return env.reset(options={"instance": "acme__shapes-unittest"})


def bash(command: str) -> str:
    return f"I look.\n```bash\n{command}\n```"


def said(env, *actions: str) -> list[str]:
    begun(env)
    return [env.step(action)[0] for action in actions]


def submitted(env, *actions: str):
    begun(env)
    for action in actions:
        env.step(action)
    return env.step(bash("submit"))


def test_the_oracle_is_paid_and_who_does_nothing_is_not(env):
    observation, info = begun(env)
    assert "The area of a rectangle is wrong." in observation
    assert info["success"] is False
    while (action := env.oracle()) is not None:
        observation, reward, over, _, info = env.step(action)
    assert (observation, reward, over) == ("The issue is mended.", 1.0, True)
    assert info["reward_components"] == {"fail_to_pass": 1.0, "pass_to_pass": 1.0}
    assert info["resolution"] == "full"
    assert submitted(env)[1:4] == (0.0, True, False)
    assert submitted(env, bash("echo '# no' >> shapes/__init__.py"))[1] == 0.0


_LISTING = "find . -path ./.git -prune -o -printf '%m %p %l\n' | sort; git ls-tree -r HEAD; git log"


def test_sandboxes_that_unpack_a_copy_have_the_same_tree(env, folder):
    row = json.loads((folder / "tasks.jsonl").read_text().splitlines()[0])
    task = repair_task(row)
    whole = base_tree(task, folder / "repos")
    tree = RepositoryTree(whole.archive)
    needs = needs_of(task, beside=None, python="")

    async def listed() -> tuple[str, str]:
        sandbox = await env._sandboxes.take()
        try:
            workspace = await unpack(sandbox, task, tree, needs)
            cwd = workspace.repo_dir
            done = await sandbox.exec(("sh", "-c", f"{_LISTING}; ls -A .."), timeout_s=60, cwd=cwd)
        finally:
            await env._sandboxes.give_back(sandbox)
        return workspace.base, done.stdout.decode()

    first = loop.run(listed())
    assert tree.committed is not None
    assert "shapes/__init__.py" in first[1]
    assert first == loop.run(listed())


def test_nothing_that_an_agent_does_to_its_tree_is_in_another_sandbox(env):
    begun(env)
    tree = env._present.episode.tree
    kept = tree.committed
    clean = env.step(bash(_LISTING))[0]
    spoilt = "printf 'def area(*a):\n    return 12\n' > shapes/__init__.py; git config user.name x"
    spoilt += "; echo 1 > tests/new.py; for f in base packed; do echo x > ../$f.tar.gz; done"
    spoilt += (
        "; git -c user.email=x commit -qam bad; rm -rf .git/objects; chmod -R a+rwx ..; echo gone"
    )
    assert env.step(bash(spoilt))[0].endswith("gone")
    assert env.step(bash("submit"))[1] == 0.0
    begun(env)
    assert env._present.episode.tree is tree
    assert tree.committed is kept
    assert kept is not None
    assert env.step(bash(_LISTING))[0] == clean
    assert env.step(bash("git status --porcelain; git fsck; git rev-parse HEAD"))[0] == kept.base


def test_commands_run_in_a_fresh_shell_and_files_stay(env):
    texts = said(
        env,
        bash("cd tests; export X=1; echo here > here.txt"),
        bash('pwd; echo "X=$X"; ls; exit 3'),
        bash("seq 100000"),
    )
    assert texts[1].startswith(f"{env._present.episode.workspace.repo_dir}\nX=\n")
    assert texts[1].endswith("(exit code 3)")
    assert "characters left out" in texts[2]
    assert len(texts[2]) < 2200
    assert texts[2].endswith("100000")


def test_what_a_command_prints_is_shown_in_order(env):
    script = "import sys; print('b'); sys.stderr.write('c\\n'); print('d')"
    (text,) = said(env, bash(f'echo a; python3 -c "{script}"; echo e >&2; echo f'))
    assert text.split() == list("abcdef")


def test_python_is_on_the_path_and_imports_the_repository(env):
    texts = said(
        env,
        bash("python -m unittest tests.test_shapes"),
        bash("cd /; command -v python; env -u PYTHONPATH python -c 'import sys; print(sys.path)'"),
    )
    assert "OK" in texts[0]
    assert texts[1].startswith(env._present.episode.path.split(":")[0])


def keeping(env, monkeypatch):
    monkeypatch.setattr(env, "config", env.config.model_copy(update={"shell": "persistent"}))


def test_a_persistent_shell_keeps_folder_variables_functions_and_options(env, monkeypatch):
    keeping(env, monkeypatch)
    texts = said(
        env,
        bash("cd tests; export X='a b'; Y=$'1\n2'; f() { echo \"f $1\"; }; shopt -s nullglob"),
        bash('pwd; echo "$X/$Y"; env | grep ^X=; f 3; echo [nothing*]; exit 4'),
        bash('echo "$X"; set -u; mkdir gone; cd gone; rmdir ../gone'),
        bash("pwd; echo $UNSET; echo never"),
        bash("set +u; false; echo $?"),
    )
    repo_dir = env._present.episode.workspace.repo_dir
    assert texts[0] == "(no output)"
    assert texts[1] == f"{repo_dir}/tests\na b/1\n2\nX=a b\nf 3\n\n\n(exit code 4)"
    assert texts[2] == "a b"
    assert texts[3].startswith(f"(the shell's folder is gone; now in {repo_dir})\n{repo_dir}\n")
    assert "UNSET: unbound variable" in texts[3]
    assert "never" not in texts[3]
    assert texts[4] == "1"


def test_a_persistent_shell_is_fresh_in_each_episode_and_after_a_stopped_command(env, monkeypatch):
    keeping(env, monkeypatch)
    said(env, bash("X=1"))
    begun(env)
    assert env.step(bash('echo "[$X]"; X=2'))[0] == "[]"
    hurried = env.config.model_copy(update={"command_timeout_s": 0.5})
    with monkeypatch.context() as patch:
        patch.setattr(env, "config", hurried)
        assert "stopped" in env.step(bash("X=3; sleep 600"))[0]
    assert env.step(bash('echo "[$X]"'))[0] == "[2]"


def called(name: str, **arguments: object) -> Call:
    return Call(name, arguments, f"call_{name}")


def test_function_calls_do_what_blocks_do(folder):
    made = RepairEnv(sandbox=ISOLATIONS["process"], tasks=folder / "tasks.jsonl", tools=True)
    try:
        first, info = begun(made)
        assert "call `submit`" in first
        assert [spec["function"]["name"] for spec in info["tools"]][:2] == ["bash", "view"]
        looked = made.step(
            ToolAction(
                "I look.",
                (called("bash", command="ls"), called("view", path="shapes/__init__.py")),
            ).text()
        )[0]
        assert [message["tool_call_id"] for message in looked] == ["call_bash", "call_view"]
        assert "shapes" in looked[0]["content"]
        assert "return w + h" in looked[1]["content"]
        assert "no call" in made.step("I think.")[0]
        replaced = called(
            "str_replace", path="shapes/__init__.py", old="return w + h", new="return w * h"
        )
        end = ToolAction("", (replaced, called("submit"), called("bash", command="ls"))).text()
        observation, reward, over, *_ = made.step(end)
        assert (reward, over) == (1.0, True)
        assert "The issue is mended." in observation[-1]["content"]
        begun(made)
        while (action := made.oracle()) is not None:
            _, reward, *_ = made.step(action)
        assert reward == 1.0
    finally:
        made.close()


def test_what_a_person_types_is_an_action(env):
    edit = "view shapes/__init__.py 1 1"
    texts = said(env, env.typed_action("echo a"), env.typed_action(edit), env.typed_action("hi"))
    assert texts[0] == "a"
    assert "def area" in texts[1]
    assert "hi: command not found" in texts[2]
    assert env.typed_action(bash("ls")) == bash("ls")
    begun(env)
    assert env.step(env.typed_action("submit"))[2] is True


def test_a_command_that_takes_too_long_is_stopped(env, monkeypatch):
    begun(env)
    hurried = env.config.model_copy(update={"command_timeout_s": 0.5})
    monkeypatch.setattr(env, "config", hurried)
    assert env.step(bash("sleep 600"))[0] == "(stopped after 0.5 s)"


def test_the_editor_edits(env):
    replace = (
        "```edit\nstr_replace shapes/__init__.py\n<<<<<<< old\n    return w + h\n=======\n"
        "    return w * h\n>>>>>>> new\n```"
    )
    texts = said(
        env,
        bash("chmod 755 shapes/__init__.py"),
        "```edit\nview shapes/__init__.py 1 2\n```",
        replace,
        "```edit\ncreate more/a.py\nx = 1\n```",
        "```edit\nundo_edit more/a.py\n```",
        "```edit\nview nothing.py\n```",
        bash("stat -c %a shapes/__init__.py; ls more"),
    )
    assert "return w + h" in texts[1]
    assert "return w * h" in texts[2]
    assert "is gone" in texts[4]
    assert texts[5] == "There is no file nothing.py."
    assert texts[6].startswith("755")
    assert "a.py" not in texts[6]
    assert env.step(bash("submit"))[1] == 1.0


def test_an_answer_that_is_no_action_is_told_how(env):
    texts = said(env, "hello", "```bash\n```", "```edit\nfly a\n```")
    assert all("exactly one action" in text for text in texts)


def test_the_last_turn_is_judged_as_it_stands(env):
    begun(env)
    gold = next(expert_actions(env.task))
    steps = [env.step(action) for action in (gold, *(["hm"] * 7))]
    assert [over for _, _, over, *_ in steps] == [False] * 7 + [True]
    assert steps[-1][1] == 1.0


TAMPERS = {
    "no git": "rm -rf .git",
    "no repository": 'cd /; rm -rf "$OLDPWD"',
    "config": "git config core.bare true; git config diff.external true; git config alias.x y",
    "another base": "git commit -q --amend --allow-empty -m x; git reset -q --hard HEAD",
    "replaced": "git config user.name a; git config user.email b; "
    "git replace HEAD $(git commit-tree HEAD^{tree} -m y)",
    "a shadowed pytest": "mkdir -p ~/bin; echo exit 0 > ~/bin/python3; chmod +x ~/bin/python3",
    "left for the grader": "echo 'import os; os._exit(0)' | tee sitecustomize.py ~/sitecustomize.py"
    " /tmp/sitecustomize.py conftest.py usercustomize.py evil.pth > /dev/null",
    "tests": "echo > tests/test_shapes.py; echo 'def same(a, b): pass' > tests/asserts.py",
    "a link": "rm tests/test_shapes.py; ln -s /etc/passwd tests/test_shapes.py",
    "a daemon": "nohup setsid sh -c 'while true; do sleep 0.1; done' > /dev/null 2>&1 &",
}


@pytest.mark.parametrize("name", TAMPERS)
def test_tampering_is_not_paid(env, name):
    if env.config.sandbox.id == "process":
        pytest.skip("there is no wall to try")
    _, reward, over, _, info = submitted(env, bash(TAMPERS[name]))
    assert (reward, over, info["success"]) == (0.0, True, False)


def test_the_sandboxes_hold_neither_the_tests_to_come_nor_the_history(env):
    if env.config.sandbox.id == "process":
        pytest.skip("there is no wall to try")
    others = " ".join(f"--exclude-dir={name}" for name in ("proc", "sys", "dev", "usr", "opt"))
    looked = said(
        env,
        bash("git log --all --format=%s; git cat-file --batch-all-objects --batch | grep -a area"),
        bash(f"grep -rsl 'test_area' / /dev/shm {others} | head"),
    )
    assert "SECRETLY" not in looked[0]
    assert "test_area" not in looked[0]
    assert looked[1].splitlines()[:1] == ["(no output)"]


@pytest.mark.parametrize(
    ("name", "why"),
    [("lost", "no commit 0123456789"), ("gone", "acme/gone"), ("quote", "No closing quotation")],
)
def test_a_task_that_cannot_be_played_is_a_failure_that_names_it(env, name, why):
    with pytest.raises(TaskFailure, match=f"{name}: .*{why}") as caught:
        env.reset(options={"instance": name})
    assert caught.value.retryable is False
    assert env._sandbox is None


def test_a_sandbox_that_dies_is_a_failure(env):
    begun(env)
    sandbox = env._sandbox
    loop.run(sandbox.close())
    with pytest.raises((SandboxFailure, RuntimeError)):
        env.step(bash("ls"))
    assert begun(env)[0]


def test_a_patch_with_fences_and_marks_goes_through_the_tools(tmp_path):
    row = shapes_task(tmp_path / "repos")
    folder = tmp_path / "repos" / "acme__shapes"
    git(folder, "checkout", "-q", str(row["base_commit"]))
    (folder / "README.md").write_text("````bash\nls\n````\n```\nEND_OF_PATCH\n")
    git(folder, "add", "-A")
    task = repair_task({**row, "patch": git(folder, "diff", "--cached")})
    first, last = (parse_action(action) for action in expert_actions(task))
    assert isinstance(first, Bash)
    git(folder, "reset", "-q", "--hard")
    import subprocess

    subprocess.run(["bash", "-c", first.command], cwd=folder, check=True, timeout=60)
    assert (folder / "README.md").read_text().startswith("````bash")
    assert last == parse_action(bash("submit"))


def test_options_are_checked():
    from rollart_core.plugins import registry

    with pytest.raises(ConfigError, match="python"):
        registry.checked_options("environments", "repair", {"python": "python3"})
