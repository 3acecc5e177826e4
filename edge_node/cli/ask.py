"""The commands `causeway-edge ask`, `route` and `listen`, which send a prompt or audio file to the daemon by the SDK.

`listen` also shows the transcript of the audio. `route --policy FILE` tries a draft of a policy, without a daemon.
"""

from __future__ import annotations

import base64
import io
import json
import sys
import wave
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.text import Text

from causeway_sdk import (
    Answer,
    Causeway,
    CausewayAPIError,
    CausewayConnectionBroken,
    CausewayError,
    CausewayTimeout,
    CausewayUnreachable,
    RequestOptions,
)
from causeway_server.router.checks.explanation import RouteExplanation, explain, try_draft
from causeway_server.router.errors import ConfigError, ModelNotFound
from causeway_server.router.policy.compiled import check_policy
from causeway_server.router.serving.process import option
from causeway_server.router.types import NowSignals

from .options import PATH, connect, read_prompt, request_arguments, request_options, usage_error

FAILED, USAGE_ERROR, UNREACHABLE, TIMED_OUT, BROKEN, INTERRUPTED = 1, 2, 3, 4, 5, 130
"""Exit codes; 2 is click's own. Ctrl-C ends with the code that a shell reports for SIGINT."""
_DEADLINE = "deadline_exceeded"  # the daemon's code for a request whose deadline passed
_GATEWAY_TIMEOUT = 504  # no target answered in time
_RATE = 16_000  # sample rate, Hz
_MAX_BYTES = 64 * 1024 * 1024
_NO_MICROPHONE = (
    "Give a WAV file, or `-` for stdin. A microphone needs `pip install 'causeway-router[microphone]'` and PortAudio."
)


@click.command()
@click.argument("text")
@request_options
@option("--no-stream", "Print the answer when it is complete, not while it is generated.", is_flag=True)
def ask(text: str, url: str, api_key: str, as_json: bool, no_stream: bool, **flags: Any) -> None:
    """Send the prompt TEXT to the running daemon, and print the answer.

    TEXT `-` reads stdin. The answer goes to stdout, its route and reason to stderr. Exit codes: 0 answered, 1 rejected
    or failed, 2 usage error, 3 daemon unreachable, 4 timed out, 5 the connection broke during the answer, 130 Ctrl-C.
    """
    prompt, arguments = read_prompt(text), request_arguments(flags)
    with _daemon(url, api_key) as (causeway, console):
        if no_stream:
            answer = causeway.chat(prompt, **arguments)
        elif as_json:
            answer = causeway.chat(prompt, stream=True, **arguments).answer()
        else:
            _write_stream(causeway, prompt, arguments, console)
            return
        if as_json:
            _write_json(_answer_document(answer))
        else:
            _write_answer(answer, console)


@click.command()
@click.argument("text")
@request_options
@option("--policy", "Policy file that decides. Without this option the running daemon decides.", PATH, to="policy_path")
@option(
    "--set",
    "Value of a signal, such as device.temperature_c=90. To say that a target is down, write down=TARGET. "
    "Only with --policy. May be repeated. Signals without a value are absent.",
    to="settings",
    multiple=True,
    metavar="SIGNAL=VALUE",
)
def route(
    text: str, url: str, api_key: str, as_json: bool, policy_path: Path | None, settings: tuple[str, ...], **flags: Any
) -> None:
    """Show how the prompt TEXT would be routed, and why. The prompt is not answered.

    TEXT `-` reads stdin. Exit codes as for ask.
    """
    prompt, arguments = read_prompt(text), request_arguments(flags)
    if policy_path is not None:
        document: object = _try_policy(policy_path, prompt, (*_request_settings(arguments), *settings))
    elif settings:
        usage_error("--set needs --policy, because a running daemon measures its own signals.")
    else:
        with _daemon(url, api_key) as (causeway, _):
            document = causeway.route(prompt, **arguments)
    out = Console()
    if as_json:
        out.print_json(msgspec.json.encode(document).decode())
        return
    for line in explain(msgspec.convert(document, RouteExplanation)):
        out.print(Text.assemble(*line), soft_wrap=True)


@click.command()
@click.argument("audio", default="")
@request_options
@option(
    "--duration-s",
    "Length of the recording in seconds. Without the file AUDIO the command records the request.",
    click.FloatRange(min=0.1, max=120.0),
    5.0,
)
def listen(audio: str, url: str, api_key: str, as_json: bool, duration_s: float, **flags: Any) -> None:
    """Send a spoken request to the running daemon, and print the answer.

    AUDIO is an audio file, or `-` for stdin; without it the microphone is recorded. The answer goes to stdout; its
    transcript, route and times to stderr. Exit codes as for ask.
    """
    data = _read_audio(audio, duration_s)
    with _daemon(url, api_key) as (causeway, console):
        part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}
        answer = causeway.chat([{"role": "user", "content": [part]}], **request_arguments(flags))
        transcript, parts = _transcript(causeway, data), _parts(causeway, answer.decision.id)
        if as_json:
            _write_json({"transcript": transcript, "parts": parts, **_answer_document(answer)})
            return
        words = transcript or "none: this device understands no speech"
        for line in (f"transcript  {words}", *map(_line, parts)):
            console.print(Text(line), soft_wrap=True)
        _write_answer(answer, console)


@contextmanager
def _daemon(url: str, api_key: str) -> Iterator[tuple[Causeway, Console]]:
    """Yield a client of the running daemon and a console on stderr. Ctrl-C, or an error of the client, is printed and
    ends the process with its exit code.
    """
    console = Console(stderr=True)
    with connect(url, api_key) as causeway:
        try:
            yield causeway, console
        except CausewayError as error:
            (first, *rest), code = _describe(error)
            console.print(Text(first, style="red"), soft_wrap=True)
            for line in rest:
                console.print(Text(line), soft_wrap=True)
            sys.exit(code)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)


def _write_stream(causeway: Causeway, text: str, arguments: RequestOptions, console: Console) -> None:
    """Write an answer to stdout as it arrives, its route, reason and times to the console."""
    with causeway.chat(text, stream=True, **arguments) as stream:
        try:
            for piece in stream:
                if piece.index == 0:
                    sys.stdout.write(piece.text)
                    sys.stdout.flush()
        finally:
            sys.stdout.write("\n")
        answer = stream.answer()
    _write_end(answer, console)


def _write_answer(answer: Answer, console: Console) -> None:
    """Write a whole answer to stdout, its route, reason and times to the console."""
    sys.stdout.write(answer.text + "\n")
    _write_end(answer, console)


def _write_end(answer: Answer, console: Console) -> None:
    sys.stdout.writelines(f"{call.name}({call.arguments})\n" for call in answer.tool_calls)
    console.print(_summary(answer), soft_wrap=True)


def _write_json(document: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")


def _summary(answer: Answer) -> Text:
    """Return the answer's route, reason and times on one line."""
    decision = answer.decision
    first = decision.first_token_ms
    parts = (
        " → ".join(part for part in (decision.route, decision.target) if part),
        f"reason {decision.reason}" if decision.reason else "",
        f"cache {decision.cache}" if decision.cache else "",
        "degraded" if decision.degraded else "",
        f"first token {first:.1f} ms" if first is not None else "",
        f"total {answer.total_ms:.1f} ms",
        f"{answer.usage.completion_tokens} tokens" if answer.usage.completion_tokens else "",
        decision.policy,
        decision.id,
    )
    return Text(" · ".join(part for part in parts if part), style="dim")


def _answer_document(answer: Answer) -> dict[str, object]:
    return {
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "tool_calls": [asdict(call) for call in answer.tool_calls],
        "model": answer.model,
        "usage": asdict(answer.usage),
        "decision": asdict(answer.decision),
        "total_ms": round(answer.total_ms, 3),
    }


def _describe(error: CausewayError) -> tuple[list[str], int]:
    if isinstance(error, CausewayUnreachable):
        return [str(error), "Is the daemon running? `causeway-edge serve` starts it."], UNREACHABLE
    if isinstance(error, CausewayTimeout):
        return [str(error)], TIMED_OUT
    if isinstance(error, CausewayConnectionBroken):
        return [str(error)], BROKEN
    if not isinstance(error, CausewayAPIError):
        return [str(error)], FAILED
    # An error within a stream comes after the status 200.
    lines = [
        f"{error.status} {error.code}: {error.message}" if error.status >= 400 else f"{error.code}: {error.message}"
    ]
    if error.code == _DEADLINE:
        lines[0] = f"timed out: {error.message}"
    if error.retry_after_s is not None:
        lines.append(f"Retry in {error.retry_after_s:g} s.")
    if error.decision is not None and error.decision.id:
        lines.append(f"decision {error.decision.id}")
    return lines, TIMED_OUT if error.code == _DEADLINE or error.status == _GATEWAY_TIMEOUT else FAILED


def _read_audio(source: str, seconds: float) -> bytes:
    """Return audio: a file, stdin ("-"), or so many seconds of the microphone (""). Exits with 2 on a failure."""
    if not source:
        return _record(seconds)
    try:
        data = sys.stdin.buffer.read(_MAX_BYTES + 1) if source == "-" else Path(source).read_bytes()
    except OSError as error:
        usage_error(f"{source}: {error.strerror}")
    name = "stdin" if source == "-" else source
    if not data:
        usage_error(f"{name}: the audio is empty.")
    if len(data) > _MAX_BYTES:
        usage_error(f"{name}: the audio is larger than {_MAX_BYTES // 1024 // 1024} MiB. Send it in pieces.")
    return data


def _transcript(causeway: Causeway, audio: bytes) -> str:
    """Return the transcript for display; "" on a device without an encoder, whose target took the audio itself."""
    try:
        return causeway.transcribe(audio)
    except CausewayAPIError:
        return ""


def _parts(causeway: Causeway, decision_id: str) -> list[dict[str, Any]]:
    """Return the decision record's entries about the audio."""
    record: Any = causeway.decision(decision_id)
    return [dict(part) for part in record["parts"]]


def _line(part: dict[str, Any]) -> str:
    sure = "" if part["confidence"] is None else f" · confidence {part['confidence']:.2f}"
    return f"            {part['status']}{' · known' if part['cached'] else ''} · {part['duration_ms']:.0f} ms{sure}"


def _record(seconds: float) -> bytes:
    """Record the microphone. Exits with status 2 if there is none."""
    try:
        import sounddevice
    except (ModuleNotFoundError, OSError):  # OSError: no PortAudio
        usage_error(_NO_MICROPHONE)
    try:
        print(f"listening for {seconds:g} s", file=sys.stderr)
        samples = sounddevice.rec(round(seconds * _RATE), samplerate=_RATE, channels=1, dtype="int16")
        sounddevice.wait()
    except sounddevice.PortAudioError as error:
        usage_error(f"The microphone does not answer ({error}): {_NO_MICROPHONE}")
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(_RATE)
        writer.writeframes(samples.tobytes())
    return file.getvalue()


def _request_settings(arguments: RequestOptions) -> Iterator[str]:
    """Yield the arguments of a request as settings of a draft."""
    fields: dict[str, object] = {**arguments, "tags": ",".join(arguments["tags"])}
    if (seconds := arguments.get("deadline_s")) is not None:
        del fields["deadline_s"]
        fields["deadline_ms"] = max(1, int(seconds * 1000))
    yield from (f"request.{name}={value}" for name, value in fields.items() if value != "")


def _try_policy(path: Path, prompt: str, settings: Iterable[str]) -> RouteExplanation:
    """Return how the policy in a file would route a prompt, with the settings that `try_draft` takes. Prints the
    policy's problems; exits with the error's status if the policy cannot route.
    """
    console = Console(stderr=True)
    try:
        text = path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        console.print(Text(f"{path}: {error.strerror}", "red"), soft_wrap=True)
        sys.exit(USAGE_ERROR)
    policy, problems = check_policy(text, str(path))
    for problem in problems:
        style = "red" if problem.severity == "error" else "yellow"
        console.print(Text(f"{problem.severity}: {problem}", style), soft_wrap=True)
    if policy is None:
        sys.exit(FAILED)
    now = datetime.now().astimezone()
    local = NowSignals(now.hour, now.isoweekday(), now.minute, int(now.timestamp()))
    try:
        return try_draft(policy, prompt, settings, local)
    except (ConfigError, ModelNotFound) as error:
        console.print(Text(error.message, "red"), soft_wrap=True)
        sys.exit(USAGE_ERROR if isinstance(error, ConfigError) else FAILED)
