"""Conversations played with given answers, for tests."""

from rollart_core.contracts.inference import GenerateResult
from rollart_core.models.thinking import FOLLOWED
from rollart_core.rollout.conversation import Conversation
from rollart_core.types import TokenSpan
from support.chat_templates import tokenizer_with


def result(token_ids, version=0, finish_reason="stop"):
    n = len(token_ids)
    spans = (TokenSpan(0, n, version),) if n else ()
    logprobs = [-0.5 - 0.25 * i for i in range(n)]
    return GenerateResult(list(token_ids), logprobs, spans, finish_reason)


def said(tokenizer, text, version=0):
    return result([*tokenizer.encode(text), tokenizer.stop_token_ids[0]], version)


def talk(name, observations, answers, history=FOLLOWED, **kwargs):
    """Play the turns; return tokenizer, conversation, prompts and action texts."""
    tokenizer = tokenizer_with(name, **kwargs)
    conversation = Conversation(tokenizer, max_context_tokens=10_000, history=history)
    prompts, actions = [], []
    for turn, (observation, answer) in enumerate(zip(observations, answers, strict=True)):
        conversation.observe(observation)
        prompts.append(list(conversation.prompt))
        answer = answer(tokenizer) if callable(answer) else answer
        sampled = said(tokenizer, answer, turn) if isinstance(answer, str) else answer
        actions.append(conversation.record(sampled))
    return tokenizer, conversation, prompts, actions
