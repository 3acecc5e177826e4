"""Certificates replaced under load, a small part of `tests.bed.rotation`: no request is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from causeway_server.router.serving.tls import contexts
from tests.bed.rotation import site


async def test_no_request_is_lost_while_certificates_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are sent all the time, half of them on new connections, and each replacement is met by a later one."""
    monkeypatch.setattr(contexts, "_CHECK_S", 0.0)
    async with site(tmp_path) as one:
        for _ in range(4):
            replacing = asyncio.ensure_future(one.replace())
            number = 0
            while number < 8 or not replacing.done():
                await asyncio.gather(*(one.ask(number + more) for more in range(4)))
                number += 4
            await one.look()
        assert not one.seen.failed
        assert one.seen.answered >= 32
        assert len(one.seen.serials) == 4
