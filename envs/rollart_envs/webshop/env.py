"""The WebShop environment: one visit to the shop as a Gymnasium episode.

Takes: actions ``search[words]`` and ``click[name]``. Gives: pages as text, and the shop's reward
when something is bought. Never: keeps state outside the instance, except the shared, immutable
shop.

``search[...]`` works on every page, ``click[x]`` only on what is clickable. Any other action
changes nothing and is reported in ``info["invalid_action"]``. Only ``click[buy now]`` ends an
episode; the caller limits the number of turns. Success is a reward of exactly 1.

The expert (:func:`next_action`) has access to the goal but uses the shop as any visitor: it
searches, pages and clicks. It chooses its query by looking up the rank of the product.
"""

from __future__ import annotations

import random
import re
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from typing import Any

import gymnasium
from gymnasium.error import ResetNeeded
from rapidfuzz import fuzz

from rollart_core.spaces import Text
from rollart_envs.webshop import page_html, pages
from rollart_envs.webshop.config import (
    Difficulty,
    Goals,
    InstructionOn,
    NounTagger,
    ObservationMode,
    WebShopConfig,
)
from rollart_envs.webshop.goals import Goal
from rollart_envs.webshop.session import BACK, BUY, NEXT, PREV, PageKind, Session
from rollart_envs.webshop.shop import SPLITS, Shop, open_shop

_NUM_CORPUS_EPISODES = 1500
_MAX_DEMO_TURNS = 40
_MAX_CORPUS_CHARS = 4_000_000


class WebShopEnv(gymnasium.Env[str, str]):
    """A simulated shop; see :class:`rollart_envs.webshop.config.WebShopConfig` for the options."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (gymnasium declares it so)

    def __init__(
        self,
        *,
        data_dir: str | PathLike[str] | None = None,
        observation_mode: ObservationMode = "text",
        goals: Goals = "synthetic",
        seed: int = 0,
        page_handles: bool = False,
        results_per_page: int = 10,
        instruction: InstructionOn = "every_page",
        num_products: int | None = None,
        difficulty: Difficulty | None = None,
        noun_tagger: NounTagger = "auto",
    ) -> None:
        self.config = WebShopConfig.model_validate(
            {
                "data_dir": data_dir,
                "observation_mode": observation_mode,
                "goals": goals,
                "seed": seed,
                "page_handles": page_handles,
                "results_per_page": results_per_page,
                "instruction": instruction,
                "num_products": num_products,
                "difficulty": difficulty,
                "noun_tagger": noun_tagger,
            }
        )
        self.shop = open_shop(self.config)
        self.observation_space = Text()
        self.action_space = Text()
        self._session: Session | None = None

    @property
    def session(self) -> Session:
        """The current visit.

        Raises:
            ResetNeeded: If there is none yet.
        """
        if self._session is None:
            raise ResetNeeded("call reset() before the first step")
        return self._session

    @property
    def goal(self) -> Goal:
        """The goal of the current visit."""
        return self.session.goal

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks of ``split``."""
        return len(self._split(split))

    def task_clusters(self, split: str) -> list[str]:
        """Return the product of each task of ``split``."""
        return [self.shop.goals[index].asin for index in self._split(split)]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start a visit.

        Args:
            seed: Draws the goal, with upstream's weights, if ``options`` do not select one.
            options: ``{"task": i, "split": "train"}`` for the i-th goal of a split, or
                ``{"goal": i}`` for one of the whole list; only ``{"split": ...}`` draws from it.

        Raises:
            ValueError: If the option, split, task or goal does not exist.
        """
        super().reset(seed=seed)
        index = self._choose_goal(options or {})
        self._session = Session(
            self.shop,
            self.shop.goals[index],
            index,
            self.config.results_per_page,
            self.config.page_handles,
        )
        return self._observe(first=True), self._info(invalid=False)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carry out ``action``; return observation, reward, terminated, truncated, info."""
        session = self.session
        if not isinstance(action, str):
            raise TypeError(f"an action is a str such as 'search[soft boots]', not {action!r:.80}")
        if session.page == PageKind.DONE:
            raise ResetNeeded("the visit ended with a purchase: call reset()")
        done = session.act(action)
        outcome = session.outcome
        reward = float(outcome.reward) if outcome else 0.0
        first = session.page == PageKind.SEARCH and not session.queries
        info = self._info(invalid=not done)
        return self._observe(first=first), reward, outcome is not None, False, info

    def oracle(self) -> str | None:
        """Return the expert's next action; None if the visit is over."""
        return next_action(self.session)

    def corpus(self) -> Iterator[str]:
        """Yield the texts of expert visits to ``train`` goals: pages and actions in turn."""
        goals = self._split("train")
        stride = max(1, len(goals) // _NUM_CORPUS_EPISODES)
        visitor = WebShopEnv(**self.config.model_dump())
        num_chars = 0
        for index in goals[::stride]:
            texts = list(visitor._demonstration(index))
            yield from texts
            num_chars += sum(map(len, texts))
            if num_chars > _MAX_CORPUS_CHARS:
                return

    def close(self) -> None:
        """Forget the visit."""
        self._session = None

    def _demonstration(self, index: int) -> Iterator[str]:
        yield self.reset(options={"goal": index})[0]
        for _ in range(_MAX_DEMO_TURNS):
            action = self.oracle()
            if action is None:
                return
            yield action
            yield self.step(action)[0]

    def _split(self, split: str) -> tuple[int, ...]:
        if split not in self.shop.splits:
            raise ValueError(f"no split {split!r}; WebShop has {', '.join(SPLITS)}")
        return self.shop.splits[split]

    def _choose_goal(self, options: dict[str, Any]) -> int:
        unknown = sorted(set(options) - {"task", "split", "goal"})
        if unknown:
            raise ValueError(f"unknown reset option {unknown[0]!r}; use task, split or goal")
        if "goal" in options:
            return _checked(options["goal"], len(self.shop.goals), "goal")
        if "task" in options:
            goals = self._split(options.get("split", "train"))
            return goals[_checked(options["task"], len(goals), "task")]
        draw = random.Random(int(self.np_random.integers(2**63)))
        if "split" in options:
            return draw.choice(self._split(options["split"]))
        weights = self.shop.cumulative_weights
        return min(bisect(weights, draw.uniform(0, weights[-1])), len(weights) - 1)

    def _observe(self, *, first: bool) -> str:
        show = first or self.config.instruction == "every_page"
        return _RENDERERS[self.config.observation_mode](self.session, show)

    def _info(self, *, invalid: bool) -> dict[str, Any]:
        session = self.session
        search = session.page == PageKind.SEARCH
        clickables = list(session.clickables)
        info: dict[str, Any] = {
            "goal": session.goal_index,
            "has_search_bar": search,
            "clickables": clickables,
            "available_actions": ["search[<words>]"]
            if search
            else [f"click[{name}]" for name in clickables],
            "invalid_action": invalid,
            "success": False,
        }
        if session.outcome is not None:
            info["reward_components"] = session.outcome.components()
            info["success"] = session.outcome.success
            info["noun_tagger"] = self.shop.nouns.name
        return info


def _checked(index: object, size: int, what: str) -> int:
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < size:
        raise ValueError(f"{what}: {index!r} is not an index from 0 to {size - 1}")
    return index


def _text(session: Session, show: bool) -> str:
    return pages.text(session, session.goal.instruction_text if show else None)


def _text_rich(session: Session, show: bool) -> str:
    return pages.text_rich(session, session.goal.instruction_text if show else None)


def _terse(session: Session, show: bool) -> str:
    return pages.terse(session, pages.terse_instruction(session.goal) if show else None)


def _html(session: Session, show: bool) -> str:
    return page_html.html(session, session.goal.instruction_text if show else None)


_RENDERERS: dict[str, Callable[[Session, bool], str]] = {
    "text": _text,
    "text_rich": _text_rich,
    "html": _html,
    "terse": _terse,
}


_PRICE = re.compile(r",? and price lower than [\d.]+ dollars$")
_NEVER = 10**6


def next_action(session: Session) -> str | None:
    """Return the expert's next action; None if the visit is over."""
    if session.page == PageKind.DONE:
        return None
    if session.page == PageKind.SUB:
        return _click(PREV)
    if session.page == PageKind.ITEM and session.product is not None:
        if session.product.asin == session.goal.asin:
            return _click(_missing_option(session) or BUY)
        return _click(BACK)
    query, page_number = find_query(session.shop, session.goal, session.page_size)
    if session.page == PageKind.RESULTS and session.queries[-1] == query:
        return _on_results(session, page_number)
    return f"search[{query}]"


def asked_words(goal: Goal) -> str:
    """Return the words of the instruction that describe the product, in lower case.

    ``Find me soft boots with color: teal, and price lower than 40.00 dollars`` gives
    ``soft boots``.
    """
    words = _PRICE.sub("", goal.instruction_text)
    if isinstance(goal.goal_options, Mapping) and goal.goal_options:
        wanted = ", and ".join(f"{name}: {value}" for name, value in goal.goal_options.items())
        words = words.removesuffix(f" with {wanted}")
    return words.removeprefix("Find me ").lower()


def find_query(shop: Shop, goal: Goal, page_size: int) -> tuple[str, int]:
    """Return the simplest query with the product on the first page, and the page number.

    If there is none, return the query with the product on the earliest page.
    """
    best, best_page = "", _NEVER
    for query in _queries(goal):
        page = _page_of(shop, goal.asin, query, page_size)
        if not best or page < best_page:
            best, best_page = query, page
        if best_page == 1:
            break
    return best, best_page


def _queries(goal: Goal) -> Iterator[str]:
    yield asked_words(goal)
    yield _PRICE.sub("", goal.instruction_text).lower()
    yield goal.name.lower()


def _page_of(shop: Shop, asin: str, query: str, page_size: int) -> int:
    for i, product in enumerate(shop.search(query, page_size)):
        if product.asin == asin:
            return i // page_size + 1
    return _NEVER


def _on_results(session: Session, page_number: int) -> str:
    for i, product in enumerate(session.shown):
        if product.asin == session.goal.asin:
            return _click(session.link(i, product))
    if page_number == _NEVER and session.shown:
        return _click(session.link(0, session.shown[0]))
    return _click(NEXT if session.page_number < page_number else PREV)


def _missing_option(session: Session) -> str | None:
    """Return the first wanted value that is not clicked yet."""
    chosen = list(session.options.values())
    for wanted in session.goal.option_values:
        if any(_fits(value, wanted) for value in chosen):
            continue
        offered = [v for v, click in session.clickables.items() if click.option is not None]
        fitting = [v for v in offered if v == wanted] or [v for v in offered if _fits(v, wanted)]
        if fitting:
            return fitting[0]
    return None


def _fits(value: str, wanted: str) -> bool:
    return value == wanted or fuzz.token_set_ratio(value, wanted) > 95


def _click(name: str) -> str:
    return f"click[{name.lower()}]"
