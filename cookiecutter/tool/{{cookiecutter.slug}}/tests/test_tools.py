"""Play episodes with tool calls."""

from rollart_core.rollout.tools import Call, ToolAction

from {{ cookiecutter.module }}.env import NUM_TASKS, {{ cookiecutter.class_name }}


def test_the_expert_looks_up_the_team_and_answers() -> None:
    env = {{ cookiecutter.class_name }}()
    for split in NUM_TASKS:
        for task in range(20):
            env.reset(options={"task": task, "split": split})
            results = []
            while not (results and results[-1][2]):
                action = env.oracle()
                assert action is not None
                results.append(env.step(action))
            assert len(results) == 2
            assert results[-1][1] == 1.0
            assert results[-1][4]["success"]


def test_an_unknown_name_is_an_error_that_the_policy_reads() -> None:
    env = {{ cookiecutter.class_name }}()
    env.reset(options={"task": 0, "split": "train"})
    call = Call("find", {"name": "nobody"}, id="call00000")
    shown, reward, terminated, *_ = env.step(ToolAction("", (call,)).text())
    assert "there is no 'nobody'" in str(shown)
    assert (reward, terminated) == (0.0, False)


def test_another_answer_earns_nothing() -> None:
    env = {{ cookiecutter.class_name }}()
    env.reset(options={"task": 0, "split": "train"})
    _, reward, terminated, _, info = env.step(ToolAction("none").text())
    assert (reward, terminated, info["success"]) == (0.0, True, False)
