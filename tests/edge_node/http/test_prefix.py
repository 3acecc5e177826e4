"""A prefix that one dialect has brought into the KV cache serves the others, and each says so exactly."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from causeway_server.edge_node.backends.engine.backend import EngineBackend
from causeway_server.edge_node.config.schema import EngineConfig
from tests.bed.agent_prefix import DIALECTS, Session, take_turn
from tests.bed.conversations import conversation
from tests.bed.count_tokens import compare, model_of, tier_of

from ..device import running

pytestmark = pytest.mark.engine


async def test_a_prefix_is_prefilled_once_in_all_dialects(tmp_path: Path) -> None:
    """A short version of `tests.bed.agent_prefix`: the dialect changes with each turn."""
    path = model_of(tmp_path, "HERMES")
    engine: Any = EngineBackend(path, EngineConfig(threads=1, sequences=2))
    session, tokens = Session("mixed", random.Random(3), 60), list[int]()
    async with running(tmp_path, engine=engine) as device:
        await engine.ready(asyncio.get_running_loop().time() + 60.0)
        for at in range(6):
            session.step()
            before = len(tokens)
            turn, tokens = await take_turn(device.session, list(DIALECTS)[at % 3], session, tokens)
            assert turn.prompt == turn.counted
            if at:
                assert turn.exact, turn
                assert turn.expected >= before - 10  # all but the place where the answer begins


async def test_the_count_is_the_length_of_the_prompt(tmp_path: Path) -> None:
    """A small part of `tests.bed.count_tokens`, with the family of the demonstration's models."""
    path = model_of(tmp_path, "HERMES")
    engine: Any = EngineBackend(path, EngineConfig(threads=1, sequences=2))
    rng = random.Random(11)
    async with running(tmp_path, engine=engine) as device:
        await engine.ready(asyncio.get_running_loop().time() + 60.0)
        for _ in range(5):
            assert await compare(device, tier_of(path), conversation(rng, "small")) == ""
