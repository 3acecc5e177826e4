"""`causeway-edge listen` and the SDK's `transcribe` against a daemon with a tiny encoder."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from causeway_sdk import AsyncCauseway, CausewayAPIError
from causeway_server.edge_node.cli.main import main
from tests.models.parts.files import wav

from ..device import Device, running
from .test_fusion import COMMAND, SILENCE, SPEECH, encoder, prompt


async def run(device: Device, *arguments: str, stdin: bytes = b"") -> Result:
    url = f"http://127.0.0.1:{device.app.port}"
    return await asyncio.to_thread(CliRunner().invoke, main, ["listen", *arguments, "--url", url], input=stdin)


@pytest.mark.slow
async def test_a_file_and_stdin_are_heard_and_answered_with_route_and_times(tmp_path: Path) -> None:
    file = tmp_path / "a.wav"
    file.write_bytes(SPEECH)
    async with running(tmp_path / "device", encoders={"audio": encoder(COMMAND)}) as device:
        result = await run(device, str(file))
        assert (result.exit_code, result.stdout) == (0, "edge says so\n")
        for words in (f"transcript  {COMMAND}", "confidence 0.88", " ms", "edge → small", "reason edge-first"):
            assert words in result.stderr
        assert prompt(device.engine).content == COMMAND
        transcription = device.newest()
        assert (transcription.request.kind, transcription.parts[0].cached) == ("transcription", True)  # heard once
        document = json.loads((await run(device, "-", "--format", "json", "--tag", "edge", stdin=SPEECH)).stdout)
        assert (document["transcript"], document["text"]) == (COMMAND, "edge says so")
        assert document["parts"][0]["cached"]
        silent = await run(device, "-", stdin=SILENCE)
        assert silent.exit_code == 1
        assert "400 invalid_value" in silent.stderr


async def test_what_cannot_be_heard_is_said(tmp_path: Path) -> None:
    async with running(tmp_path) as device:
        assert "400 unsupported_feature" in (await run(device, "-", stdin=SPEECH)).stderr  # no encoder
        for arguments, words in (((str(tmp_path / "none.wav"),), "No such file"), (("-",), "empty")):
            result = await run(device, *arguments)
            assert (result.exit_code, words in result.stderr) == (2, True)
    gone = await asyncio.to_thread(
        CliRunner().invoke, main, ["listen", "-", "--url", "http://127.0.0.1:9"], input=SPEECH
    )
    assert gone.exit_code == 3


@pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("sounddevice") is not None, reason="there may be a microphone"
)
def test_without_a_microphone_it_says_what_one_needs() -> None:
    result = CliRunner().invoke(main, ["listen"])
    assert result.exit_code == 2
    assert "causeway-router[microphone]" in result.stderr


@pytest.mark.slow
async def test_the_sdk_transcribes(tmp_path: Path) -> None:
    async with (
        running(tmp_path, encoders={"audio": encoder(COMMAND)}) as device,
        AsyncCauseway(f"http://127.0.0.1:{device.app.port}") as causeway,
    ):
        assert await causeway.transcribe(SPEECH, language="en") == COMMAND
        assert await causeway.transcribe(SILENCE) == ""
        with pytest.raises(CausewayAPIError, match="`file`"):
            await causeway.transcribe(wav(__import__("numpy").zeros(0)))
