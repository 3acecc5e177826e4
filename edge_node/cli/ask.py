"""`causeway-edge ask`, `route` and `listen`: send one prompt or sound to the running daemon through the SDK.

`listen` shows the transcript of the sound besides. `route --policy FILE` tries a draft of a policy, without a daemon.
"""

from __future__ import annotations

import base64
import io
import json
import sys
import wave
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import msgspec
from rich.console import Console
from rich.text import Text

from causeway import (
    Answer,
    Causeway,
    CausewayAPIError,
    CausewayConnectionBroken,
    CausewayError,
    CausewayTimeout,
    CausewayUnreachable,
    RequestOptions,
)
from router.checks.explanation import RouteExplanation, explain
from router.errors import ConfigError, ModelNotFound
from router.types import NowSignals

from .options import usage_error

ANSWERED, FAILED, USAGE_ERROR, UNREACHABLE, TIMED_OUT, BROKEN, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130
"""Exit codes; 2 is click's own. Ctrl-C ends as the shell names a program that SIGINT ended."""
_DEADLINE = "deadline_exceeded"  # the daemon's code for a request whose deadline passed
_GATEWAY_TIMEOUT = 504  # no target answered in its time
_RATE = 16_000  # Hz
_MAX_BYTES = 64 * 1024 * 1024
_NO_MICROPHONE = (
    "give a WAV file, or `-` for stdin; a microphone needs `pip install 'causeway[microphone]'` and PortAudio"
)


def ask(
    causeway: Causeway,
    text: str,
    arguments: RequestOptions,
    *,
    stream: bool = True,
    as_json: bool = False,
    out: TextIO,
    console: Console,
) -> int:
    """Send a prompt; write the answer to `out` as it arrives and its route and reason to the console.

    Args:
        causeway: The client.
        text: The prompt.
        arguments: The arguments of the SDK's `chat`.
        stream: Stream the answer.
        as_json: Write one JSON document instead of text.
        out: Receives the answer.
        console: Receives the route and errors (stderr).

    Returns:
        The exit code.
    """

    def send() -> None:
        if as_json:
            answer = (
                causeway.chat(text, stream=True, **arguments).answer() if stream else causeway.chat(text, **arguments)
            )
            out.write(json.dumps(answer_document(answer), ensure_ascii=False) + "\n")
        elif stream:
            _write_stream(causeway, text, arguments, out, console)
        else:
            write_answer(causeway.chat(text, **arguments), out, console)

    return run(send, console)


def route(
    causeway: Causeway, text: str, arguments: RequestOptions, *, as_json: bool = False, out: Console, console: Console
) -> int:
    """Show how a prompt would be routed, without running it, and return the exit code."""

    def send() -> None:
        document = causeway.route(text, **arguments)
        if as_json:
            out.print_json(json.dumps(document))
            return
        _print_explanation(msgspec.convert(document, RouteExplanation), out)

    return run(send, console)


def _write_stream(causeway: Causeway, text: str, arguments: RequestOptions, out: TextIO, console: Console) -> None:
    with causeway.chat(text, stream=True, **arguments) as stream:
        try:
            for piece in stream:
                if piece.index == 0:
                    out.write(piece.text)
                    out.flush()
        finally:
            out.write("\n")
        answer = stream.answer()
    _write_tool_calls(answer, out)
    console.print(_summary(answer), soft_wrap=True)


def write_answer(answer: Answer, out: TextIO, console: Console) -> None:
    """Write a whole answer to `out`, its route, reason and times to the console."""
    out.write(answer.text + "\n")
    _write_tool_calls(answer, out)
    console.print(_summary(answer), soft_wrap=True)


def _write_tool_calls(answer: Answer, out: TextIO) -> None:
    out.writelines(f"{call.name}({call.arguments})\n" for call in answer.tool_calls)


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


def answer_document(answer: Answer) -> dict[str, object]:
    """Return what ``--json`` prints of an answer."""
    return {
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "tool_calls": [asdict(call) for call in answer.tool_calls],
        "model": answer.model,
        "usage": asdict(answer.usage),
        "decision": asdict(answer.decision),
        "total_ms": round(answer.total_ms, 3),
    }


def run(send: Callable[[], None], console: Console) -> int:
    """Call `send`; print an error that it raises and return the exit code."""
    try:
        send()
    except CausewayError as error:
        (first, *rest), code = _describe(error)
        console.print(Text(first, style="red"), soft_wrap=True)
        for line in rest:
            console.print(Text(line), soft_wrap=True)
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    return ANSWERED


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


def read_sound(source: str, seconds: float) -> bytes:
    """Return a sound as a file; exit with status 2 where there is none.

    Args:
        source: the path of a file; "-" for stdin, "" for the microphone.
        seconds: how long the microphone is recorded.
    """
    if not source:
        return _record(seconds)
    try:
        data = sys.stdin.buffer.read(_MAX_BYTES + 1) if source == "-" else Path(source).read_bytes()
    except OSError as error:
        usage_error(f"{source}: {error.strerror}")
    name = "stdin" if source == "-" else source
    if not data:
        usage_error(f"{name}: the sound is empty")
    if len(data) > _MAX_BYTES:
        usage_error(f"{name}: larger than {_MAX_BYTES // 1024 // 1024} MiB; send it in pieces")
    return data


def listen(
    causeway: Causeway, sound: bytes, arguments: RequestOptions, *, as_json: bool, out: TextIO, console: Console
) -> int:
    """Send a sound as a message; write the answer to `out`, the transcript and the times to the console.

    Returns:
        The exit code, as of `ask`.
    """

    def send() -> None:
        part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound).decode(), "format": "wav"}}
        answer = causeway.chat([{"role": "user", "content": [part]}], **arguments)
        transcript, parts = _transcript(causeway, sound), _parts(causeway, answer.decision.id)
        if as_json:
            document = {"transcript": transcript, "parts": parts, **answer_document(answer)}
            out.write(json.dumps(document, ensure_ascii=False) + "\n")
            return
        words = transcript or "none: this box understands no speech"
        for line in (f"transcript  {words}", *map(_line, parts)):
            console.print(Text(line), soft_wrap=True)
        write_answer(answer, out, console)

    return run(send, console)


def _transcript(causeway: Causeway, sound: bytes) -> str:
    """The words, in the form that people read; "" on a box without an encoder, whose target took the sound itself."""
    try:
        return causeway.transcribe(sound)
    except CausewayAPIError:
        return ""


def _parts(causeway: Causeway, decision_id: str) -> list[dict[str, Any]]:
    """What the decision record says of the sound."""
    record: Any = causeway.decision(decision_id)
    return [dict(part) for part in record["parts"]]


def _line(part: dict[str, Any]) -> str:
    sure = "" if part["confidence"] is None else f" · confidence {part['confidence']:.2f}"
    return f"            {part['status']}{' · known' if part['cached'] else ''} · {part['duration_ms']:.0f} ms{sure}"


def _record(seconds: float) -> bytes:
    """Record the microphone; exit with status 2 where there is none."""
    try:
        import sounddevice
    except (ModuleNotFoundError, OSError):  # OSError: no PortAudio
        usage_error(_NO_MICROPHONE)
    try:
        print(f"listening for {seconds:g} s", file=sys.stderr)
        samples = sounddevice.rec(round(seconds * _RATE), samplerate=_RATE, channels=1, dtype="int16")
        sounddevice.wait()
    except sounddevice.PortAudioError as error:
        usage_error(f"the microphone does not answer ({error}): {_NO_MICROPHONE}")
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(_RATE)
        writer.writeframes(samples.tobytes())
    return file.getvalue()


def request_settings(flags: Mapping[str, Any]) -> Iterator[str]:
    """Yield the flags of a request as settings of a draft."""
    seconds = flags["deadline_s"]
    fields = {
        "model": flags["model"],
        "prefer": flags["prefer"],
        "tags": ",".join(flags["tags"]),
        "temperature": flags["temperature"],
        "max_tokens": flags["max_tokens"],
        "deadline_ms": None if seconds is None else max(1, int(seconds * 1000)),
    }
    yield from (f"request.{name}={value}" for name, value in fields.items() if value not in (None, ""))


def route_draft(
    path: Path, prompt: str, settings: Iterable[str], *, as_json: bool, out: Console, console: Console
) -> int:
    """Show how the policy in a file would route a prompt, and return the exit code.

    Args:
        path: the policy's file.
        prompt: the request's text.
        settings: signals and fields of the request, as `try_draft` takes them.
        as_json: print JSON.
        out: receives the explanation.
        console: receives errors and the policy's warnings (stderr).
    """
    from router.checks.explanation import try_draft  # on demand: reading a policy takes a second on a small box
    from router.policy.compiled import check_policy

    try:
        text = path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        console.print(Text(f"{path}: {error.strerror}", "red"), soft_wrap=True)
        return USAGE_ERROR
    policy, problems = check_policy(text, str(path))
    for problem in problems:
        style = "red" if problem.severity == "error" else "yellow"
        console.print(Text(f"{problem.severity}: {problem}", style), soft_wrap=True)
    if policy is None:
        return FAILED
    now = datetime.now().astimezone()
    local = NowSignals(now.hour, now.isoweekday(), now.minute, int(now.timestamp()))
    try:
        explanation = try_draft(policy, prompt, settings, local)
    except (ConfigError, ModelNotFound) as error:
        console.print(Text(error.message, "red"), soft_wrap=True)
        return USAGE_ERROR if isinstance(error, ConfigError) else FAILED
    if as_json:
        out.print_json(msgspec.json.encode(explanation).decode())
        return ANSWERED
    _print_explanation(explanation, out)
    return ANSWERED


def _print_explanation(explanation: RouteExplanation, out: Console) -> None:
    for line in explain(explanation):
        out.print(Text.assemble(*line), soft_wrap=True)
