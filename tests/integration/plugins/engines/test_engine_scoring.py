"""The embedded engine as a teacher: the logprobs of given tokens, those the trainer computes."""

import asyncio

import numpy as np
import pytest
import torch
from support.small_models import make_sample, reference_logprobs, save_model

from rollart_core.contracts.inference import GenerateRequest, ScoreRequest
from rollart_core.errors import InferenceFailure
from rollart_core.training.trainer import load_model
from rollart_plugins.engines import embedded
from rollart_plugins.engines.embedded import EmbeddedEngine
from rollart_testing import ScriptedEngine


def request(sample, number=0, **changes):
    asked = {
        "request_id": f"r{number}",
        "token_ids": sample.token_ids.tolist(),
        "positions": np.flatnonzero(sample.loss_mask).tolist(),
        "temperature": 0.7,
    }
    return ScoreRequest(**{**asked, **changes})


def with_engine(path, work, **options):
    async def run():
        engine = EmbeddedEngine(model_path=path, device="cpu", max_context_tokens=400, **options)
        await engine.start()
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


@pytest.mark.parametrize("decoder", ["own", "transformers"])
@pytest.mark.parametrize("piece", [128, 7])
def test_scores_are_the_models_own(tmp_path, monkeypatch, decoder, piece):
    monkeypatch.setattr(embedded, "PIECE_TOKENS", piece)
    path = save_model(tmp_path / "model")
    samples = [make_sample(np.random.default_rng(n), 40 + 150 * n, prefix=20) for n in (0, 1)]
    model = load_model(path)
    want = torch.cat([reference_logprobs(model, s, 0.7) for s in samples]).detach()

    async def work(engine):
        # Rows are scored at once, while the engine generates, and leave no slot taken.
        prompt = GenerateRequest("g", [1, 2, 3], 12)
        answers = await asyncio.gather(
            engine.generate(prompt), *(engine.score(request(s, i)) for i, s in enumerate(samples))
        )
        alone = await engine.generate(GenerateRequest("again", [1, 2, 3], 12))
        assert answers[0].token_ids == alone.token_ids
        assert (await engine.stats()).num_sessions == 0
        return np.concatenate(answers[1:])

    got = with_engine(path, work, decoder=decoder, max_sessions=2)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-5)


def test_what_cannot_be_scored_is_refused(tmp_path):
    sample = make_sample(np.random.default_rng(0), 30, prefix=10)

    async def work(engine):
        assert await engine.score(request(sample, positions=[])) == []
        for wrong, said in (
            ({"positions": [0]}, "positions must be ascending"),
            ({"positions": [99]}, "positions must be ascending"),
            ({"token_ids": [10**6] * 9}, "not in the vocabulary"),
            ({"token_ids": [1] * 500}, "exceeds the context of 400"),
            ({"temperature": 0.0}, "must be greater than 0"),
        ):
            with pytest.raises(InferenceFailure, match=said) as caught:
                await engine.score(request(sample, **wrong))
            assert not caught.value.retryable

    with_engine(save_model(tmp_path / "model"), work)
    with pytest.raises(InferenceFailure, match="ScriptedEngine cannot score given tokens"):
        asyncio.run(ScriptedEngine(lambda asked: [0]).score(request(sample)))
