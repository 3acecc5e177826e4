"""Speaks commands by espeak-ng, sends them to an edge daemon as audio clips, and compares its calls with typed
text's."""

from __future__ import annotations

import argparse
import asyncio
import base64
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from causeway_server.edge_node.app import App, build
from causeway_server.edge_node.config.schema import Config, ServerConfig
from causeway_server.models.catalog.artifact import find_artifact, find_signal
from causeway_server.models.signals.calibration import CalibrationParameters, ConfidenceCalibrator
from causeway_server.router.bundle.settings import PartsConfig
from causeway_server.router.openai.chat import parse_chat
from causeway_server.router.parts.reading import spoken_form
from causeway_server.router.types import RoutingHints
from causeway_train.data.transcripts import TranscribedRow
from causeway_train.function_calls.call import score_answer
from causeway_train.function_calls.dataset import Row, is_held_out, is_validation_row, read_rows
from causeway_train.function_calls.intents import is_device_row
from causeway_train.signals.graded_answers import answer_rows
from causeway_train.signals.quality import HALVES
from causeway_train.signals.spoken import SpokenMetrics, grade_heard, measure_spoken

from .network import NetworkWatch

COMMANDS = Path(__file__).with_name("commands.jsonl")
FORMAT = (
    'Give JSON lines with the labels of HWU64, as {"text": "wake me at six", "intent": "alarm_set", '
    '"slots": [["time", "six"]]}; without --data (DATA=), the sentences in tests/bench/voice/commands.jsonl are spoken.'
)
_TOKENS, _BELOW = 8, 0.55  # the default policy's handoff


class Spoken(msgspec.Struct, frozen=True):
    """One command: its transcript, and whether the two calls are right."""

    row: TranscribedRow
    words: int
    word_errors: int
    typed_exact: bool
    spoken_exact: bool
    total_s: float  # from the end of speech to the call
    hearing_s: float  # of it, decoder and Whisper


def speak(text: str, voice: str, espeak: list[str]) -> bytes:
    return subprocess.run([*espeak, "-v", voice, "--stdout", text], capture_output=True, check=True).stdout


def word_errors(said: str, heard: str) -> int:
    """Levenshtein's distance in words, without case and punctuation."""
    left, right = words_of(said), words_of(heard)
    row = list(range(len(right) + 1))
    for at, word in enumerate(left, start=1):
        row, above = [at], row
        for index, other in enumerate(right, start=1):
            row.append(min(above[index] + 1, row[-1] + 1, above[index - 1] + (word != other)))
    return row[-1]


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower().replace("'", ""))


async def ask(session: aiohttp.ClientSession, content: object) -> dict[str, Any]:
    body = {"model": "auto", "messages": [{"role": "user", "content": content}]}
    async with session.post(
        "/v1/chat/completions", json=body, headers={"x-causeway-prefer": "only_on_device"}
    ) as reply:
        answer: dict[str, Any] = await reply.json()
        assert reply.status == 200, answer
        return answer


async def measure(app: App, session: aiohttp.ClientSession, row: Row, voice: str, wav: bytes) -> Spoken:
    typed = await ask(session, row.text)
    content = [{"type": "input_audio", "input_audio": {"data": base64.b64encode(wav).decode(), "format": "wav"}}]
    started = time.monotonic()
    spoken = await ask(session, content)
    total_s = time.monotonic() - started
    record = app.parts.decisions.newest
    assert record is not None
    # Remembered by its hash: this costs nothing, and the transcript is shown nowhere else.
    request = parse_chat(
        msgspec.json.encode({"model": "auto", "messages": [{"role": "user", "content": content}]}), RoutingHints()
    )
    assert app.parts.encoders is not None
    heard = next(iter((await app.parts.encoders.graph.facts(request, time.monotonic() + 60)).facts.values()))
    assert heard is not None
    return Spoken(
        TranscribedRow(row, voice, heard.text, heard.confidence),
        words=len(words_of(row.text)),
        word_errors=word_errors(row.text, spoken_form(heard.text, heard.language)),
        typed_exact=score_answer(text_of(typed), row).exact,
        spoken_exact=score_answer(text_of(spoken), row).exact,
        total_s=total_s,
        hearing_s=sum(part.duration_ms for part in record.parts) / 1000.0,
    )


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def choose_rows(data: Path | None, count: int) -> list[Row]:
    """Return the commands: the ones that ship, or held-back rows of HWU64 that the calibrator was not fitted on.

    Raises ArtifactError: a line is no row. Exits where there is no such row.
    """
    rows = list(read_rows(COMMANDS if data is None else data, "hwu64"))  # the labels are HWU64's in both
    if data is not None:
        rows = [row for row in rows if is_validation_row(row) and is_device_row(row.source, row.intent)]
        rows = [row for row in rows if not is_held_out(row.text, HALVES, 0.5)]
    if not rows:
        sys.exit(f"{data}: no held-back command that the device's assistant answers. {FORMAT}")
    return sorted(rows, key=lambda row: row.text)[:: max(1, len(rows) // count)][:count]


async def run(arguments: argparse.Namespace, watch: NetworkWatch) -> None:
    """Measure, and print the report."""
    rows = choose_rows(arguments.data, arguments.rows)
    voices = arguments.voices.split(",")
    watch.start()
    with tempfile.TemporaryDirectory() as folder:
        patient = PartsConfig(audio_timeout_s=110.0, language="en")
        app = build(Config(state_dir=folder, server=ServerConfig(port=0), parts=patient), environ={})
        if app.parts.encoders is None or "audio" not in app.parts.encoders.kinds:
            sys.exit("no speech: pip install 'causeway-router[voice]' and causeway-models pull speech")
        await app.start()
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{app.port}") as session:
                await ask(session, "are you there")  # the engine is loaded
                results = []
                for at, row in enumerate(rows):
                    voice = voices[at % len(voices)]
                    wav = await asyncio.to_thread(speak, row.text, voice, arguments.espeak.split())
                    results.append(await measure(app, session, row, voice, wav))
        finally:
            await app.close()
        watched = watch.stop()
        kind = "own sentences, written for this demonstration" if arguments.data is None else "held-back rows"
        report(kind, results, watched, await asyncio.to_thread(handed_off, results, Path(folder)))


def handed_off(results: list[Spoken], folder: Path) -> SpokenMetrics:
    """What the default policy's handoff keeps on the device of these commands, before and after `train-spoken`."""
    model = find_artifact("assistant")
    calibrator = find_signal("confidence", model)
    answers = answer_rows(model, [one.row.as_heard for one in results], folder)
    heard = [one for half in grade_heard([one.row for one in results], answers) for one in half]
    parameters = msgspec.json.decode(calibrator.path.read_bytes(), type=CalibrationParameters)
    return measure_spoken(heard, ConfidenceCalibrator(parameters), _TOKENS, _BELOW)


def report(kind: str, results: list[Spoken], watched: list[str], kept: SpokenMetrics) -> None:
    count = len(results)
    warm = results[1:] or results  # the first one loads Whisper
    total = sorted(one.total_s for one in warm)
    print(f"{count} commands ({kind}), synthetic speech (espeak-ng)")
    print(f"word error rate           {error_rate(results):7.1%}")
    for voice in dict.fromkeys(one.row.voice for one in results):
        print(f"  {voice:23} {error_rate([one for one in results if one.row.voice == voice]):7.1%}")
    print(f"exact calls, typed        {sum(r.typed_exact for r in results) / count:7.1%}")
    print(f"exact calls, spoken       {sum(r.spoken_exact for r in results) / count:7.1%}")
    print(
        f"end of speech to call     {statistics.median(total):6.2f} s median, {total[int(0.95 * len(total))]:.2f} s p95"
    )
    print(f"of it decoder and Whisper {statistics.median(r.hearing_s for r in warm):6.2f} s median")
    print(f"of it the assistant       {statistics.median(r.total_s - r.hearing_s for r in warm):6.2f} s median")
    print(f"first, with loading       {results[0].total_s:6.2f} s")
    print(f"of {kept.rows} heard commands, handed off, and wrong ones kept on the device")
    print(f"  as if typed             {1 - kept.typed_kept:7.1%} {kept.typed_wrong_kept:7.1%}")
    print(f"  calibrated on speech    {1 - kept.spoken_kept:7.1%} {kept.spoken_wrong_kept:7.1%}")
    for line in watched:
        print(line)


def error_rate(results: list[Spoken]) -> float:
    return sum(one.word_errors for one in results) / sum(one.words for one in results)
