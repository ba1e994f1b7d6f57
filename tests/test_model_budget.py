"""Models share memory by bytes: idle ones go least recently used first, busy ones stay, who finds no room waits."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from hotneuron.deploy.keep_alive import parse_keep_alive
from hotneuron.deploy.model_budget import ModelBudget, NoRoomError
from hotneuron.models.errors import RequestError


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


async def alive() -> bool:
    return True


async def dead() -> bool:
    return False


async def hold(budget: ModelBudget, name: str, n_bytes: int, in_flight: int = 0, is_alive: Any = alive) -> None:
    await budget.reserve(name, name, n_bytes, is_alive)
    await budget.use(name, in_flight)

    async def go() -> None:
        await budget.until_unwanted(name)
        await budget.release(name)

    budget_tasks.add(asyncio.ensure_future(go()))


budget_tasks: set[asyncio.Future[None]] = set()


def test_the_least_recently_used_goes_first() -> None:
    async def test() -> None:
        budget = ModelBudget(100, 10, 5)
        for name in ("a", "b", "c"):
            await hold(budget, name, 30)
        await budget.use("a", 1)
        await budget.use("a", 0)  # b is now the oldest
        await hold(budget, "d", 30)
        assert set(budget._holders) == {"a", "c", "d"}
        await hold(budget, "e", 60)
        assert set(budget._holders) == {"d", "e"}
        budget.check_integrity()

    run(test())


def test_a_busy_model_stays_and_who_wants_its_room_waits() -> None:
    async def test() -> None:
        budget = ModelBudget(100, 10, 5)
        await hold(budget, "a", 80, in_flight=2)
        waiting = asyncio.ensure_future(hold(budget, "b", 50))
        await asyncio.sleep(0.05)
        assert not waiting.done() and set(budget._holders) == {"a"}
        await budget.use("a", 0)
        await asyncio.wait_for(waiting, 3)
        assert set(budget._holders) == {"b"}

    run(test())


def test_the_queue_is_bounded_and_its_patience_ends() -> None:
    async def test() -> None:
        budget = ModelBudget(100, 1, 0.3)
        await hold(budget, "a", 80, in_flight=1)
        waiting = asyncio.ensure_future(hold(budget, "b", 50))
        await asyncio.sleep(0.01)
        with pytest.raises(NoRoomError, match="already wait"):
            await hold(budget, "c", 50)
        with pytest.raises(NoRoomError, match="came free within"):
            await waiting
        with pytest.raises(NoRoomError, match="needs"):
            await hold(budget, "d", 101)
        assert budget.taken_bytes == 80 and not budget._waiting

    run(test())


def test_what_a_dead_replica_held_comes_back() -> None:
    async def test() -> None:
        budget = ModelBudget(100, 10, 5)
        await hold(budget, "a", 80, in_flight=1, is_alive=dead)
        await hold(budget, "b", 50)
        assert set(budget._holders) == {"b"}

    run(test())


@pytest.mark.parametrize("seed", range(3))
def test_ten_thousand_random_turns(seed: int) -> None:
    async def test() -> None:
        rng, budget = random.Random(seed), ModelBudget(100, 50, 0.002)
        for turn in range(3300):
            name = f"m{turn}"
            try:
                await hold(budget, name, rng.randrange(1, 60), in_flight=rng.choice((0, 0, 0, 1)))
            except NoRoomError:
                for busy in list(budget._holders):
                    await budget.use(busy, 0)
            budget.check_integrity()
            if budget._holders and rng.random() < 0.2:
                await budget.release(rng.choice(list(budget._holders)))
        for name in list(budget._holders):
            await budget.release(name)
        assert budget.taken_bytes == 0

    run(test())


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("5m", 300), ("1h30m", 5400), ("90", 90), (12, 12), ("0", 0), (0, 0), ("-1", math.inf), (-1, math.inf),
     ("1.5h", 5400), ("250ms", 0.25), ("-5m", math.inf)],
)  # fmt: skip
def test_keep_alive(said: str | float, seconds: float) -> None:
    assert parse_keep_alive(said) == seconds


@pytest.mark.parametrize("said", ["", "m", "5 m", "5x", "ten", "1e3", "5m5", math.nan, "--1", "1" * 40])
def test_keep_alive_that_means_nothing(said: str | float) -> None:
    with pytest.raises(RequestError, match="keep_alive"):
        parse_keep_alive(said)
