import pytest

from rollart_core.rollout.tools import Call, ToolAction
from rollart_envs.toy.stock import StockEnv


def _play(env, action, task=0):
    env.reset(options={"task": task, "split": "test"})
    return env.step(action.text())


def test_the_expert_looks_both_up_at_once_and_is_right():
    env = StockEnv()
    for task in range(20):
        observation, info = env.reset(options={"task": task, "split": "test"})
        assert [tool["function"]["name"] for tool in info["tools"]] == ["stock"]
        shown, _, done, *_ = env.step(env.oracle())
        counts = [int(message["content"]) for message in shown]
        assert not done
        answer = ToolAction.read(env.oracle()).content
        one, other = observation[0]["content"].removeprefix("more ").rstrip("?").split(" or ")
        assert answer == (one if counts[0] > counts[1] else other)
        _, reward, done, _, info = env.step(env.oracle())
        assert (reward, done, info["success"]) == (1.0, True, True)


def test_what_is_not_asked_for_is_not_told_and_a_guess_ends():
    shown, *_ = _play(StockEnv(), ToolAction("", (Call("stock", {"item": "moons"}),)))
    assert shown[0]["content"] == "error: no 'moons' here"
    _, reward, done, _, info = _play(StockEnv(), ToolAction("moons"))
    assert (reward, done, info["success"]) == (0.0, True, False)


@pytest.mark.parametrize("options", [{"task": 1000, "split": "test"}, {"task": 0, "split": "x"}])
def test_tasks_that_are_not_there_are_refused(options):
    with pytest.raises(ValueError, match="split"):
        StockEnv().reset(options=options)
    with pytest.raises(ValueError, match="most is 0"):
        StockEnv(most=0)
