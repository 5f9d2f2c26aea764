import asyncio
import time

from rollart_core.contracts.inference import GenerateRequest
from rollart_testing import ScriptedEngine


def test_thousands_of_sessions_are_cheap():
    async def main():
        engine = ScriptedEngine(record=False)
        await engine.start()
        began = time.process_time()
        requests = [
            GenerateRequest(f"{i}", (1, 2, 3), max_new_tokens=8, session_id=f"{i}")
            for i in range(5000)
        ]
        await asyncio.gather(*(engine.generate(r) for r in requests))
        assert time.process_time() - began < 3
        await engine.close()

    asyncio.run(main())
