"""Conversations with servers that return text, and what is sent to them."""

from rollart_core.config.run import Rollout
from rollart_core.contracts.inference import GenerateRequest, GenerateResult, TextAnswer
from rollart_core.rollout.text_conversation import TextConversation
from rollart_plugins.engines.config import OpenAIConfig
from rollart_plugins.engines.openai import text_answer, text_body

ANSWER = GenerateResult([], [], (), "stop", text=TextAnswer("go", reasoning="hm"))


def played(**rollout):
    talk = TextConversation(Rollout(**rollout), {"enable_thinking": False})
    for observation in ("one", "two"):
        talk.observe(observation)
        assert talk.record(ANSWER) == "go"
    return talk


def test_reasoning_is_recorded_but_not_sent_back():
    talk = played()
    assert talk.newest == {"role": "assistant", "content": "go", "reasoning_content": "hm"}
    assert [sorted(m) for m in talk.messages] == [["content", "role"]] * 4
    assert [m["role"] for m in talk.messages] == ["user", "assistant"] * 2


def test_kept_thinking_is_sent_back_and_observations_have_the_chosen_role():
    talk = played(keep_thinking=True, observation_role="tool")
    assert [m["role"] for m in talk.messages] == ["user", "assistant", "tool", "assistant"]
    assert talk.messages[1]["reasoning_content"] == "hm"


def test_a_server_gets_the_variables_of_its_template():
    talk = played()
    request = GenerateRequest(
        "r", (), 4, messages=talk.messages, template_kwargs=talk.template_kwargs
    )
    config = OpenAIConfig(base_url="http://127.0.0.1:1/v1")
    assert text_body("m", request, config)["chat_template_kwargs"] == {"enable_thinking": False}
    without = GenerateRequest("r", (), 4, messages=talk.messages)
    assert "chat_template_kwargs" not in text_body("m", without, config)


def test_both_names_of_reasoning_are_read():
    for name in ("reasoning_content", "reasoning"):
        message = {"content": "go", name: "hm"}
        answer = {"choices": [{"message": message, "finish_reason": "stop"}]}
        assert text_answer(answer).text.reasoning == "hm"
    answer = {"choices": [{"message": {"content": "go", "reasoning": None}}]}
    assert text_answer(answer).text.reasoning == ""
