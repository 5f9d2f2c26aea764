from itertools import product

import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv as GymnasiumLake
from gymnasium.utils.env_checker import check_env

from rollart_envs.toy.frozen_lake import FrozenLakeEnv
from rollart_envs.toy.grid import ACTIONS
from rollart_envs.toy.sokoban import SokobanEnv, solve

BOTH = pytest.mark.parametrize("make", [FrozenLakeEnv, SokobanEnv])


def play_oracle(env):
    done, num_turns = False, 0
    while not done:
        _, reward, terminated, truncated, info = env.step(env.oracle())
        done, num_turns = terminated or truncated, num_turns + 1
    return reward, info["success"], num_turns


@BOTH
def test_gymnasiums_own_check_accepts_it(make):
    env = make()
    check_env(env, skip_render_check=True)


@BOTH
def test_a_task_is_the_same_on_every_instance_and_seed(make):
    one, two = make(), make()
    pages = {one.reset(seed=i, options={"task": 5, "split": "test"})[0] for i in range(3)}
    assert pages == {two.reset(options={"task": 5, "split": "test"})[0]}


@BOTH
def test_actions_are_read_leniently_and_garbage_moves_nothing(make):
    env = make(hint=False)
    page, _ = env.reset(seed=1)
    for garbage in ("", "go left", "left.", "\n", "é", "lefts"):
        after, reward, terminated, truncated, info = env.step(garbage)
        assert (after, reward, terminated, truncated) == (page, 0.0, False, False)
        assert info["invalid_action"] is True
    action = env.oracle()
    after, *_, info = env.step(f"  {action.upper()}\n")
    assert after != page
    assert info["invalid_action"] is False


@BOTH
def test_truncates_at_max_turns_and_then_wants_a_reset(make):
    env = make(max_turns=6)
    env.reset(seed=0)
    for turn in range(6):
        *_, terminated, truncated, _ = env.step("nothing")
        assert (terminated, truncated) == (False, turn == 5)
    with pytest.raises(RuntimeError, match="reset"):
        env.step("left")


@BOTH
def test_bad_tasks_and_options_are_refused(make):
    env = make()
    with pytest.raises(ValueError, match="not one of train, warm, test"):
        env.reset(options={"split": "dev"})
    with pytest.raises(ValueError, match="0 to 999"):
        env.reset(options={"split": "test", "task": 1000})
    with pytest.raises(ValueError, match="size"):
        make(size=99)


@BOTH
def test_pages_are_terse_and_explain_once(make):
    env = make()
    first, _ = env.reset(seed=0)
    assert first.startswith(env.explanation)
    later, *_ = env.step("left")
    assert len(later.split()) == 1 + 16
    assert make(hint=False).reset(seed=0)[0] == first.split("\n", 1)[1]


@BOTH
def test_corpus_holds_pages_and_actions(make):
    texts = [text for _, text in zip(range(200), make().corpus(), strict=False)]
    assert set(ACTIONS) <= set(texts)
    assert sum(make.heading in text for text in texts) > 80


@pytest.mark.parametrize("slippery", [False, True])
def test_lake_moves_as_gymnasiums_does(slippery):
    ours = FrozenLakeEnv(size=5, slippery=slippery, hole_probability=0.3)
    level = ours.level("train", 3)
    theirs = GymnasiumLake(desc=level.split("\n"), is_slippery=slippery)
    ours.reset(seed=0, options={"task": 3})
    for state, action in product(range(25), range(4)):
        cell = divmod(state, 5)
        if level.split("\n")[cell[0]][cell[1]] in "HG":
            continue
        wanted = {(new, reward, over) for _, new, reward, over in theirs.P[state][action]}
        seen = set()
        for _ in range(40 if slippery else 1):
            ours._player = cell
            reward, over = ours.move(ACTIONS[action])
            seen.add((ours._player[0] * 5 + ours._player[1], reward, over))
        assert seen == wanted


def test_a_box_is_pushed_but_not_through_walls_boxes_or_backwards():
    env = SokobanEnv(size=3, hint=False)
    env.reset(seed=0)
    env.load("PBF\nFFF\nFFT")
    assert env.move("right") == (0.0, False)
    assert env.rows()[0] == "FPB"
    env.move("right")
    assert env.rows()[0] == "FPB"
    env.move("left")
    assert env.rows()[0] == "PFB"
    assert env.oracle() is None
    env.load("PBB\nFFF\nTFT")
    env.move("right")
    assert env.rows()[0] == "PBB"


def test_sokoban_oracle_is_shortest_and_knows_when_all_is_lost():
    env = SokobanEnv(size=3)
    env.reset(seed=0)
    env.load("PFF\nFBT\nFFF")
    assert env.oracle() in ("down", "right")
    assert len(solve(env._floor, env._targets, env._state)) == 2
    env.load("BFP\nFFF\nFFT")
    assert env.oracle() is None
    env.load("DFP\nFFF\nFFF")
    assert env.solved


def test_sokoban_oracle_plans_anew_after_a_move_that_is_not_its_own():
    env = SokobanEnv(size=4, hint=False)
    env.reset(seed=0)
    env.load("PFFF\nFFFF\nFBFT\nFFFF")
    for _ in range(3):
        wrong = next(a for a in ACTIONS if a != env.oracle())
        env.step(wrong)
    assert env.oracle() == solve(env._floor, env._targets, env._state)[0]
    assert play_oracle(env)[:2] == (1.0, True)
