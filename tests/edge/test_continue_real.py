"""An answer that a real gateway cut short, continued through the daemon."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from tests.cloud.conftest import PATIENCE_S
from tests.ladder.test_real import CHAT, Bed, bed, gateway, triton_environment, tritons

from .box import POLICY, Answer, Box, running

__all__ = ["bed", "gateway", "triton_environment", "tritons"]

pytestmark = [pytest.mark.triton, pytest.mark.engine, pytest.mark.slow]
BUSY = POLICY.replace("model: m-large", "model: busy").replace("200ms", "20s").replace("350ms", "20s")
ASK = {name: value for name, value in CHAT.items() if name != "messages"}


class Gateway:
    """What `running` asks of a cloud."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


async def asked(box: Box, token: str = "", *, stream: bool) -> Answer:
    """Of the cloud's busy tier."""
    more = {"causeway": {"continue": token}} if token else {}
    text = CHAT["messages"][0]["content"]  # type: ignore[index]
    return await box.ask(text, tags="cloud", stream=stream, headers={"x-causeway-prefer": "only_cloud"}, **ASK, **more)


async def cut(bed: Bed, box: Box, *, stream: bool) -> Answer:
    """Ask, while others keep the tier busy, until the answer is a shortened one."""
    done = anyio.Event()

    async def work() -> None:
        while not done.is_set():
            await bed.ask("busy")

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(work)
        with anyio.fail_after(PATIENCE_S):
            while True:
                found = await asked(box, stream=stream)
                if found.status == 200 and found.resume:
                    break
        done.set()
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_answer_and_its_rest_are_the_uncut_answer(bed: Bed, tmp_path: Path, stream: bool) -> None:
    """As for a direct client of the gateway: greedy, part by part, the very text that was never cut."""
    uncut = await bed.ask("medium")
    cloud = Gateway(bed.url)
    async with running(tmp_path, policy=BUSY, cloud=cloud, api_key="kiosk-secret") as box:  # type: ignore[arg-type]
        first = await cut(bed, box, stream=stream)
        assert first.headers["x-causeway-degraded"] == "true"
        assert uncut.text.startswith(first.text)
        assert len(first.text) < len(uncut.text)
        text, token = first.text, first.resume
        with anyio.fail_after(PATIENCE_S):
            while token:
                rest = await asked(box, token, stream=not stream)
                if rest.status != 200:
                    continue
                assert rest.headers["x-causeway-reason"] == "continued"
                text, token = text + rest.text, rest.resume
        assert text == uncut.text
        forged = await asked(box, first.resume[:-12] + "AAAAAAAAAAA=", stream=False)
        assert (forged.status, forged.code) == (400, "invalid_value")
