"""The embedded engine behind the gateway: what is recorded is what the model says of those rows."""

import asyncio
from dataclasses import replace

import aiohttp
import torch
from support.chat_templates import tokenizer_with
from support.gateways import LIMITS, TICKET, Http
from support.small_models import reference_logprobs, save_model
from transformers import AutoModelForCausalLM

from rollart_core.gateway.gateway import Gateway, GatewaySettings
from rollart_plugins.engines.config import EmbeddedConfig
from rollart_plugins.engines.embedded import EmbeddedEngine

TEMPERATURE = 0.8


def user(text):
    return {"role": "user", "content": text}


async def program(http):
    """Two turns, three tries at once of a third, one of them gone on with; then a summary."""
    talk = [user("a red shirt, [red] [large] for $40.99")]
    for text in ("search[red shirt]", "click[red]"):
        talk += [await http.say(talk), user(text)]
    tries = await asyncio.gather(*(http.say(talk) for _ in range(3)))
    assert len({each["content"] for each in tries}) > 1
    more = [*talk, tries[1], user("ok")]
    await asyncio.gather(http.say(more), http.say([user("summary: red")]))
    await http.say([*talk[:2], user("[b] c")])


def test_logprobs_of_all_branches_are_those_of_the_model(tmp_path):
    tokenizer = tokenizer_with("chatml")
    folder = save_model(tmp_path, vocab_size=tokenizer.vocab_size)
    engine = EmbeddedEngine(EmbeddedConfig(), model_path=folder, max_context_tokens=500)

    async def main():
        gateway = Gateway(engine, tokenizer, GatewaySettings(max_context_tokens=500))
        limits = replace(LIMITS, max_new_tokens=12, temperature=TEMPERATURE)
        await engine.start()
        await gateway.start()
        try:
            async with aiohttp.ClientSession() as session:
                async with gateway.episode(TICKET, limits) as gateway_session:
                    await program(Http(session, gateway_session))
                    cached = (await engine.stats()).cached_tokens
                return gateway_session, cached, await engine.stats()
        finally:
            await gateway.close()
            await engine.close()

    gateway_session, cached, after = asyncio.run(main())
    samples = gateway_session.samples()
    assert len(gateway_session.turns) == 8
    assert len(samples) == 5  # the talk with one try, two more tries, the summary, the other turn
    assert sum(s.num_loss_tokens for s in samples) == sum(
        t.num_new_tokens for t in gateway_session.turns
    )
    assert cached > max(t.num_prompt_tokens for t in gateway_session.turns)
    assert after.num_sessions == 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for sample in samples:
            expected = reference_logprobs(model, sample, TEMPERATURE)
            recorded = torch.from_numpy(sample.inference_logprobs[sample.loss_mask])
            assert torch.allclose(recorded, expected, atol=1e-4)
