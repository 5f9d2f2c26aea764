import pytest
from gymnasium.utils.env_checker import check_env

from rollart_envs.toy.bandit import SIGNS, BanditEnv


def pull(env, arm, task=0, split="train"):
    env.reset(options={"task": task, "split": split})
    return env.step(arm)


def sign_of(env, task, split="train"):
    page, _ = env.reset(options={"task": task, "split": split})
    return SIGNS.index(page.split(":")[0])


def test_gymnasiums_own_check_accepts_it():
    check_env(BanditEnv(), skip_render_check=True)


def test_what_pays_hangs_on_the_sign_alone_and_each_arm_pays_under_one():
    env = BanditEnv(decoy=0.5, signs=4)
    best = {}
    for task in range(60):
        sign = sign_of(env, task)
        pays = {arm: pull(env, arm, task)[1] for arm in ("red", "blue", "gold", "teal")}
        assert sorted(pays.values()) == [0.0, 0.0, 0.5, 1.0]
        assert pays == best.setdefault(sign, pays)
    assert len({max(p, key=p.get) for p in best.values()}) == 4


def test_success_is_to_be_right_in_all_turns():
    env = BanditEnv(turns=2, arms=2)
    for answers, wanted in (((True, True), True), ((True, False), False), ((False, True), False)):
        env.reset(options={"task": 3, "split": "test"})
        total = 0.0
        for right in answers:
            good = env.oracle()
            wrong = next(a for a in ("red", "blue") if a != good)
            page, reward, done, _, info = env.step(good if right else wrong)
            assert page.startswith("paid" if right else "nothing")
            total += reward
        assert (done, info["success"], total) == (True, wanted, sum(answers) / 2)
    with pytest.raises(RuntimeError, match="reset"):
        env.step("red")


def test_with_a_secret_of_its_own_each_task_teaches_the_form_alone():
    env, seen = BanditEnv(secret=None, signs=4), []
    for task in range(800):
        sign = sign_of(env, task)
        arm = env.oracle()
        assert env.step(arm)[1] == 1.0
        seen.append((sign, arm))
    assert len(set(seen)) == 16
    assert max(map(seen.count, set(seen))) < 2 * 800 / 16


def test_an_expert_that_pulls_any_arm_teaches_the_form_and_leaves_the_secret():
    env, honest, seen = BanditEnv(expert="any", signs=4), BanditEnv(signs=4), []
    for task in range(400):
        sign = sign_of(env, task)
        arm = env.oracle()
        seen.append((sign, arm))
        assert env.step(arm)[1] == 1.0
        assert pull(env, honest.best(sign), task)[1] == 1.0  # a player that does not ask
    assert len(set(seen)) == 16
    assert max(map(seen.count, set(seen))) < 2 * 400 / 16


def test_arms_get_stuck_in_training_alone_and_may_not_when_tried_again():
    env = BanditEnv(best_fails=0.4, others_fail=0.1)
    stuck = {"best": 0, "other": 0}
    for _ in range(600):
        for which in stuck:
            sign = sign_of(env, 5)
            best = env.best(sign)
            try:
                env.step(best if which == "best" else env.decoy(sign))
            except RuntimeError:
                stuck[which] += 1
    assert 0.3 < stuck["best"] / 600 < 0.5
    assert 0.05 < stuck["other"] / 600 < 0.15
    always = BanditEnv(best_fails=1.0, others_fail=1.0)
    with pytest.raises(RuntimeError, match="stuck"):
        pull(always, "red")
    assert pull(always, "red", split="test")[2]


def test_a_failure_that_is_kept_silent_is_a_reward_of_nothing():
    env = BanditEnv(best_fails=1.0, failures="zero")
    env.reset(options={"task": 1, "split": "train"})
    page, reward, done, _, info = env.step(env.oracle())
    assert (page, reward, done, info["success"]) == ("stuck", 0.0, True, False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"arms": 9}, "arms"),
        ({"failures": "zero"}, "has no effect"),
        ({"secret": None, "expert": "any"}, "has no effect"),
        ({"decoy": 1.0}, "decoy"),
        ({"arm": 2}, "arm"),
    ],
)
def test_bad_options_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        BanditEnv(**options)


@pytest.mark.parametrize(("task", "split"), [(1000, "test"), (-1, "train"), (0, "dev")])
def test_tasks_that_are_not_there_are_refused(task, split):
    with pytest.raises(ValueError, match="split"):
        BanditEnv().reset(options={"task": task, "split": split})


def test_a_word_that_is_no_arm_pulls_none():
    page, reward, done, _, info = pull(BanditEnv(best_fails=1.0, others_fail=1.0), "lever")
    assert (page, reward, done, info["invalid_action"]) == ("nothing.", 0.0, True, True)
