"""An answer that a real gateway cut short, continued through the daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from causeway_server.edge_node.config.schema import ServerConfig
from tests.cloud_pool.conftest import PATIENCE_S
from tests.cloud_pool.degradation.test_real import CHAT, Bed, bed, gateway, triton_environment, tritons, truncated

from ..device import POLICY, Answer, Device, running

__all__ = ["bed", "gateway", "triton_environment", "tritons"]

pytestmark = [pytest.mark.triton, pytest.mark.engine, pytest.mark.slow]
# Nothing is kept: an answer that was not cut would be given again and again.
LATE = POLICY.replace("model: m-large", "model: late")
LATE = LATE[: LATE.index("cache:")] + LATE[LATE.index("limits:") :]
ASK = {name: value for name, value in CHAT.items() if name != "messages"}


class Gateway:
    """What `running` asks of a cloud."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


async def ask(device: Device, token: str = "", *, stream: bool) -> Answer:
    """Of the cloud's tier whose answers are cut."""
    more: dict[str, Any] = {"causeway": {"continue": token}} if token else {}
    text = CHAT["messages"][0]["content"]  # type: ignore[index]
    return await device.ask(
        text, tags="cloud", stream=stream, headers={"x-causeway-prefer": "only_cloud"}, **{**ASK, **more}
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_answer_and_its_rest_are_the_uncut_answer(bed: Bed, tmp_path: Path, stream: bool) -> None:
    """As for a direct client of the gateway: greedy, part by part, the very text that was never cut."""
    uncut = await bed.send("medium")
    cloud = Gateway(bed.url)
    server = ServerConfig(port=0, default_deadline_s=PATIENCE_S)
    async with running(tmp_path, policy=LATE, server=server, cloud=cloud, api_key="kiosk-secret") as device:  # type: ignore[arg-type]
        first = await truncated(lambda: ask(device, stream=stream), lambda found: bool(found.resume))
        assert first.headers["x-causeway-degraded"] == "true"
        assert first.text
        assert len(first.text) < len(uncut.text)
        text, token = first.text, first.resume
        while token:
            rest = await ask(device, token, stream=not stream)
            assert rest.status == 200
            assert rest.headers["x-causeway-reason"] == "continued"
            text, token = text + rest.text, rest.resume
        assert text == uncut.text
        forged = await ask(device, first.resume[:-12] + "AAAAAAAAAAA=", stream=False)
        assert (forged.status, forged.code) == (400, "invalid_value")
