"""Training and validation together have no more episodes at once than the limit."""

import asyncio
import random

from rollart_core.scheduling.events import (
    EpisodeFinished,
    PlacesLent,
    RunStarted,
    SchedulePolicy,
    StartEpisode,
)
from rollart_core.scheduling.scheduler import Scheduler
from rollart_core.scheduling.tasks import TaskSource
from rollart_core.scheduling.validation_slots import LentPlaces


def scheduler(most: int) -> Scheduler:
    policy = SchedulePolicy(8, 4, most, max_staleness=1)
    return Scheduler(policy, TaskSource("fake/Env-v0", "train", 50, 0))


def num_started(actions) -> int:
    return sum(isinstance(a, StartEpisode) for a in actions)


def test_training_leaves_the_places_that_it_lends_and_takes_them_back() -> None:
    s = scheduler(6)
    assert num_started(s.handle(PlacesLent(4))) == 0
    assert num_started(s.handle(RunStarted())) == 2
    assert num_started(s.handle(PlacesLent(6))) == 0
    assert num_started(s.handle(EpisodeFinished("g0000000.0", 0, 0))) == 0
    assert num_started(s.handle(PlacesLent(3))) == 2
    assert num_started(s.handle(PlacesLent(0))) == 3


def test_both_together_keep_to_the_limit_and_both_come_to_an_end() -> None:
    async def main() -> tuple[int, int, int]:
        rng, s, most = random.Random(0), scheduler(5), 5
        running: set[asyncio.Task[None]] = set()
        seen, validating, num_played = 0, 0, 0

        def handle(event) -> None:
            for action in s.handle(event):
                if isinstance(action, StartEpisode):
                    running.add(asyncio.ensure_future(train(action.ticket.ticket_id)))
            places.look()
            look()

        def look() -> None:
            nonlocal seen
            seen = max(seen, s.num_running + validating)

        async def train(ticket_id: str) -> None:
            nonlocal num_played
            for _ in range(rng.randrange(1, 5)):
                await asyncio.sleep(0)
            num_played += 1
            handle(EpisodeFinished(ticket_id, 0, 0))

        async def validate() -> None:
            nonlocal validating
            async with places:
                validating += 1
                look()
                for _ in range(rng.randrange(1, 5)):
                    await asyncio.sleep(0)
                validating -= 1

        places = LentPlaces(most, lambda: s.num_running, lambda n: handle(PlacesLent(n)))
        handle(RunStarted())
        places.begin(12)
        await asyncio.gather(*(validate() for _ in range(12)))
        places.end()
        while running:
            await running.pop()
        return seen, validating, num_played

    assert asyncio.run(main()) == (5, 0, 64)
