"""Reward functions that look at the answer, and those made of others."""

import pytest

from rollart_core.contracts.reward import Reward, RewardResult
from rollart_core.contracts.reward_check import result_problem, results_problem
from rollart_core.errors import ConfigError
from rollart_core.plugins import registry
from rollart_rewards.examples import asked
from rollart_rewards.numeric import last_number
from rollart_testing import example_request


def value(reward_id, answer, reference=None, options=None, **fields):
    reward = registry.build("rewards", reward_id, options)
    return reward.score(asked(answer, reference=reference, **fields)).value


@pytest.mark.parametrize(
    ("part", "said", "right"),
    [
        ("message", "42", 1.0),
        ("message", "it is 42", 0.0),
        ("last_line", "I think\n 42 \n\n", 1.0),
        ("boxed", r"\boxed{1} no, \boxed{42}", 1.0),
        ("boxed", r"\boxed{42", 0.0),
        ("boxed", "42", 0.0),
        ({"tag": "answer"}, "<answer>41</answer> wait <answer> 42 </answer>.", 1.0),
        ({"tag": "answer"}, "</answer>42<answer>", 0.0),
        ({"pattern": r"#### (.+)$"}, "6 * 7\n#### 42\nDone", 1.0),
        ({"pattern": r"#### (.+)"}, "42", 0.0),
    ],
)
def test_the_part_of_the_message_that_counts(part, said, right):
    assert value("exact-match", said, 42, {"answer": part}) == right


def test_braces_inside_a_sandbox_are_matched():
    assert value("exact-match", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", {"answer": "boxed"}) == 1


def test_what_makes_no_difference_is_up_to_the_options():
    said, right = "The  Eiffel-Tower!", "eiffeltower"
    assert value("exact-match", said, right) == 0
    ignore = ["case", "space", "punctuation", "articles"]
    assert value("exact-match", said, right, {"ignore": ignore}) == 1
    assert value("exact-match", "a  b", "a b", {"ignore": []}) == 0


@pytest.mark.parametrize("reward_id", ["exact-match", "numeric"])
def test_an_environment_that_does_not_say_what_is_right_is_no_zero(reward_id):
    with pytest.raises(ValueError, match="example/Env-v0 provides no 'reference' to its reward"):
        value(reward_id, "42")
    with pytest.raises(ValueError, match="not a text, a number or a list"):
        value(reward_id, "42", {"is": 42})
    with pytest.raises(ValueError, match="not a text, a number or a list"):
        value(reward_id, "42", [])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("$1,234.50 in all.", "1234.50"),
        ("−3", "-3"),
        ("x1 is 7", "7"),
        ("1,2 and 1,234", "1234"),
        ("-1/4", "-0.25"),
        ("1.2e-3", "0.0012"),
        (".5", "0.5"),
        ("50%", "50"),
        ("The answer is:\n- 42", "42"),
        ("10 - 5", "5"),
        ("10-5", "5"),
        ("-$5", "-5"),
        ("- $ 5", "-5"),
        ("none", None),
        ("1/0", None),
        ("1e9999999", None),
        ("nan inf", None),
    ],
)
def test_the_last_number(text, number):
    assert str(last_number(text)) == str(number)


def test_numbers_are_compared_within_tolerance_and_exactly_without():
    assert value("numeric", "3.1416", 3.14159265) == 0
    assert value("numeric", "3.1416", 3.14159265, {"rel_tol": 1e-5}) == 1
    assert value("numeric", "0.001", 0, {"abs_tol": 0.001}) == 1
    big = "123456789012345678901234567890"
    exact = {"rel_tol": 0.0}
    assert value("numeric", big, big, exact) == 1
    assert value("numeric", big[:-1] + "1", big, exact) == 0
    with pytest.raises(ValueError, match="'many' is not a number"):
        value("numeric", "3", "many")


def test_a_pattern_is_searched_in_no_more_than_it_may():
    assert value("regex", "well\nRED", options={"pattern": "^red$", "ignore_case": True}) == 1
    assert value("regex", "red" * 9, options={"pattern": "red", "max_chars": 20}) == 0


@pytest.mark.parametrize(
    ("options", "said", "share"),
    [
        ({"tags": ["think", "answer"]}, " <think>a</think>\n<answer>b</answer>\n", 1.0),
        ({"tags": ["think", "answer"]}, "<answer>b</answer><think>a</think>", 0.0),
        ({"tags": ["think", "answer"]}, "<think>a</think>so<answer>b</answer>", 0.0),
        ({"tags": ["think"]}, "<think><think></think>", 0.0),
        ({"pattern": "a.b"}, "a\nb", 1.0),
        ({"pattern": "a.b"}, "a\nb.", 0.0),
        ({"json_schema": {"type": "object", "required": ["x"]}}, '```json\n{"x": 1}\n```', 1.0),
        ({"json_schema": {"type": "object", "required": ["x"]}}, '{"y": 1}', 0.0),
        ({"json_schema": {"type": "object"}}, "[" * 100_000, 0.0),
    ],
)
def test_forms(options, said, share):
    assert value("format", said, options={"form": options}) == share


def test_every_message_counts_or_the_last():
    talk = tuple({"role": "assistant", "content": c} for c in ("ok", "no", "no", "ok"))
    assert value("format", "", options={"form": {"pattern": "ok"}}, messages=talk) == 0.5
    last = {"form": {"pattern": "ok"}, "messages": "last"}
    assert value("format", "", options=last, messages=talk) == 1
    with pytest.raises(ValueError, match="wrote no message"):
        value("format", "", options={"form": {"pattern": "ok"}}, messages=())


def test_length_costs_evenly_between_free_and_limit():
    reward = registry.build("rewards", "length-penalty", {"free": 10, "limit": 20})
    told = [reward.score(asked("x", num_loss_tokens=n)).value for n in (0, 10, 15, 20, 99)]
    assert told == [0, 0, -0.5, -1, -1]
    for unit, cost in (("words", -0.5), ("chars", -1.0), ("turns", 0.0)):
        options = {"free": 1, "limit": 3, "unit": unit}
        assert value("length-penalty", "one two", options=options) == cost


@pytest.mark.parametrize(
    ("reward_id", "options", "reason"),
    [
        ("exact-match", {"answer": {"pattern": "x"}}, "must have exactly one group"),
        ("regex", {"pattern": "("}, "not a valid regular expression"),
        ("format", {}, "form: is missing"),
        ("format", {"form": {"tags": ["a"], "pattern": "b"}}, "form"),
        ("format", {"form": {"tags": []}}, "tags"),
        ("format", {"form": {"json_schema": {"type": "thing"}}}, "json_schema is not a valid"),
        ("length-penalty", {"free": 5, "limit": 5}, r"free \(5\) must be below limit \(5\)"),
        ("numeric", {"rel_tol": float("nan")}, "rel_tol"),
        ("weighted", {"parts": {}}, "parts"),
        ("weighted", {"parts": {"a": {"reward": "exact-mach"}}}, "Did you mean 'exact-match'"),
        ("weighted", {"parts": {"a": {"reward": {"id": "regex", "patern": "x"}}}}, "patern"),
        ("weighted", {"parts": {"a": {"reward": "group-rank"}}}, "WeightedGroup-v1"),
        ("group-rank", {"of": "group-rank"}, "scores whole groups"),
    ],
)
def test_mistakes_are_told_before_anything_is_scored(reward_id, options, reason):
    with pytest.raises(ConfigError, match=reason):
        registry.checked_options("rewards", reward_id, options)


def weighted(**parts):
    return {"parts": {name: {"reward": ref, "weight": w} for name, (ref, w) in parts.items()}}


def test_a_weighted_reward_shows_its_parts():
    short = {"id": "length-penalty", "free": 1, "limit": 3, "unit": "words"}
    options = weighted(right=({"id": "numeric"}, 1.0), short=(short, 0.2))
    reward = registry.build("rewards", "weighted", options)
    result = reward.score(asked("it's 42", reference=42))
    assert result.value == pytest.approx(0.9)
    assert result.components["right"] == 1.0
    assert result.components["short"] == -0.5
    assert result.components["short.length"] == 2.0


class Wild(Reward):
    """Answers what it should not."""

    def score(self, request):
        return RewardResult(request.env_return)


def test_what_a_part_may_not_say_is_not_added_up():
    here = f"{__name__}:Wild"
    reward = registry.build("rewards", "weighted", weighted(wild=(here, 0.0)))
    for said, problem in ((2.0, "2, outside its range 0 to 1"), (float("nan"), "the value nan")):
        with pytest.raises(ValueError, match=f"wild answered {problem}"):
            reward.score(asked("x", env_return=said))


def test_weights_that_leave_the_range_are_refused():
    length = {"id": "function", "function": "builtins:len"}
    with pytest.raises(ValueError, match="can reach 10100; the maximum is 10000"):
        registry.build("rewards", "weighted", weighted(a=(length, 100.0), b=("numeric", -100.0)))


def values(reward_id, requests, options=None):
    reward = registry.build("rewards", reward_id, options)
    return [round(result.value, 6) for result in reward.score_group(requests)]


def test_a_rank_is_the_share_of_siblings_that_are_beaten():
    group = [asked("x", env_return=r) for r in (5.0, -3.0, 5.0, 1.0)]
    assert values("group-rank", group) == [0.833333, 0.0, 0.833333, 0.333333]
    assert values("group-rank", group[:1]) == [0.5]
    by = {"of": {"id": "length-penalty", "free": 1, "limit": 9, "unit": "chars"}}
    assert values("group-rank", [asked("x" * n) for n in (9, 1, 5)], by) == [0, 1, 0.5]


def test_only_who_is_right_gains_by_being_short():
    told = [(10, True), (20, True), (30, True), (10, False), (30, False)]
    group = [asked("x", num_loss_tokens=n, success=right) for n, right in told]
    assert values("group-length", group) == [0.5, 0.0, -0.5, 0.0, -0.5]
    assert values("group-length", [group[0], group[3]]) == [0.0, 0.0]
    group = [asked(text, reference="7", num_loss_tokens=n) for text, n in (("7", 2), ("8", 1))]
    assert values("group-length", group, {"right": "numeric"}) == [-0.5, 0.0]
    with pytest.raises(ValueError, match="set `right` to a reward"):
        values("group-length", [example_request(), asked("x")])


def test_diversity_is_the_distance_to_siblings():
    group = [asked(f"so <a>{text}</a>") for text in ("ab", "ab", "cd")]
    assert values("group-diversity", group, {"answer": {"tag": "a"}}) == [0.5, 0.5, 1.0]
    assert values("group-diversity", group[:1]) == [1.0]


def test_a_weighted_group_mixes_both_kinds():
    group = [asked(text, reference="ab") for text in ("ab", "ab", "cd")]
    options = weighted(right=("exact-match", 1.0), other=("group-diversity", 0.1))
    assert values("weighted-group", group, options) == [1.05, 1.05, 0.1]


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (RewardResult(0.5, {"a": 1}), ""),
        (RewardResult(1.0000001), ""),
        (RewardResult(float("inf")), "the value inf"),
        (RewardResult(True), "the value True"),
        (RewardResult(10**400), "the value 1000"),
        (RewardResult("1"), "the value '1'"),
        (RewardResult(None), "the value None"),
        (RewardResult(-0.1), "-0.1, outside its range 0 to 1"),
        (RewardResult(0.5, {"a": float("nan")}), "no number as its component 'a'"),
        (0.5, "a float, not a RewardResult"),
    ],
)
def test_answers_are_held_to_the_contract_where_they_enter(result, problem):
    found = result_problem(result, (0.0, 1.0))
    assert found.startswith(problem)
    assert bool(found) == bool(problem)


def test_a_group_is_answered_whole():
    one = RewardResult(0.5)
    assert results_problem([one, one], 2, (0.0, 1.0)) == ""
    assert results_problem([one], 2, (0.0, 1.0)) == "1 results for 2 requests"
    assert results_problem(None, 2, (0.0, 1.0)) == "a NoneType, not a list of results"
    assert results_problem([one, RewardResult(3)], 2, (0.0, 1.0)).startswith("3, outside")
