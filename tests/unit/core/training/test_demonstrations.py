from itertools import count

import pytest
from support.chat_templates import tokenizer_with

from rollart_core.errors import ConfigError, EnvironmentFailure
from rollart_core.models.thinking import History
from rollart_core.training.warm_start import demonstrations, env_corpus
from rollart_core.types import Task


class Corridor:
    """Go right ``task + 1`` times; a task of 5 or more is one the expert does not solve."""

    def __init__(self, says_success=True):
        self.says_success = says_success
        self.closed = 0
        self.raises = None

    def reset(self, *, seed=None, options=None):
        self.task, self.at = options["task"], 0
        self.seen = (seed, options["split"])
        return f"[{self.at}]", {}

    def step(self, action):
        if self.raises:
            raise self.raises
        self.at += action == "right"
        done = self.at > self.task or self.at == 5
        solved = self.at > self.task
        info = {"success": solved} if self.says_success else {}
        return f"[{self.at}]", 0.5 * solved, done, False, info

    def oracle(self):
        return None if self.task == 9 else "right"

    def close(self):
        self.closed += 1


class Wordless:
    reset = Corridor.reset
    close = Corridor.close
    closed = 0


LIMITS = {"max_turns": 10, "max_context_tokens": 200}


def tasks(*indexes):
    return [Task("corridor", "train", i, 100 + i) for i in indexes]


def demos(env, chosen, **changes):
    return list(
        demonstrations(lambda: env, tokenizer_with("ours"), chosen, **{**LIMITS, **changes})
    )


def test_the_experts_actions_and_stop_tokens_are_what_is_trained():
    env = Corridor()
    (sample,) = demos(env, tasks(1))
    tokenizer = tokenizer_with("ours")
    assert tokenizer.decode(sample.token_ids.tolist()) == (
        "<|user|>[0]<|assistant|>right<|end|>[1]<|assistant|>right<|end|>"
    )
    trained = tokenizer.decode(sample.token_ids[sample.loss_mask].tolist())
    assert trained == "right<|end|>right<|end|>"
    assert (sample.inference_logprobs == 0).all()
    assert set(sample.policy_versions[sample.loss_mask].tolist()) == {0}
    assert env.seen == (101, "train")


@pytest.mark.parametrize(
    ("env", "changes", "num_samples"),
    [
        (Corridor(), {}, 3),  # 0, 1 and 4; 5 fails, 9 has no expert
        (Corridor(says_success=False), {}, 3),
        (Corridor(), {"max_turns": 2}, 2),
        (Corridor(), {"max_context_tokens": 25}, 2),
    ],
)
def test_only_episodes_worth_imitating_are_kept(env, changes, num_samples):
    assert len(demos(env, tasks(0, 1, 4, 5, 9), **changes)) == num_samples
    assert env.closed == 1


def test_a_task_that_comes_again_is_not_played_again():
    env = Corridor()
    played = []
    reset = env.reset
    env.reset = lambda **given: played.append(given["seed"]) or reset(**given)
    again = Task("corridor", "train", 1, 7)  # of another seed: another episode
    samples = demos(env, [*tasks(1, 9), *tasks(1, 9), again])
    assert played == [101, 109, 7]
    assert len(samples) == 3
    assert samples[0] is samples[1]


def test_a_stopped_stream_closes_the_environment():
    env = Corridor()
    endless = (Task("corridor", "train", 0, i) for i in count())
    stream = demonstrations(lambda: env, tokenizer_with("ours"), endless, **LIMITS)
    next(stream)
    stream.close()
    assert env.closed == 1


@pytest.mark.parametrize("chosen", [tasks(6, 7), (Task("c", "train", 6, i) for i in count())])
def test_an_expert_that_never_succeeds_is_an_error_not_an_endless_loop(chosen):
    with pytest.raises(ConfigError, match=r"no episode to imitate in (2|256) tasks"):
        demos(Corridor(), chosen)


def test_an_environment_without_an_expert_is_refused():
    with pytest.raises(ConfigError, match=r"Wordless has no oracle\(\)"):
        demos(Wordless(), tasks(0))


def test_an_environment_that_raises_is_named():
    env = Corridor()
    env.raises = RuntimeError("broken")
    with pytest.raises(EnvironmentFailure, match=r"env\.step: RuntimeError: broken"):
        demos(env, tasks(0))
    assert env.closed == 1


def test_the_corpus_is_what_the_expert_reads_and_writes():
    env = Corridor()
    assert list(env_corpus(env, tasks(1))) == ["[0]", "right", "[1]", "right"]
    assert env.closed == 0


def test_an_environments_own_corpus_comes_first():
    env = Corridor()
    env.corpus = lambda: iter(["own", "text"])
    assert list(env_corpus(env, [])) == ["own", "text"]


def test_observations_of_demonstrations_have_the_role_of_the_run():
    tokenizer = tokenizer_with("opens")
    (sample,) = demonstrations(
        Corridor,
        tokenizer,
        tasks(1),
        history=History("tool", keeps_thinking=True),
        max_turns=10,
        max_context_tokens=500,
    )
    text = tokenizer.decode(sample.token_ids.tolist())
    assert "<|im_start|>user\n[[1]]<|im_end|>" in text
    trained = tokenizer.decode(sample.token_ids[sample.loss_mask].tolist())
    assert trained == 2 * "</think>\n\nright<|im_end|>"
