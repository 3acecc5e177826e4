"""`causeway-edge ask` and `route`: send one prompt to the running daemon through the SDK."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TextIO

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

ANSWERED, FAILED, UNREACHABLE, TIMED_OUT, BROKEN, INTERRUPTED = 0, 1, 3, 4, 5, 130
"""Exit codes; 2 is click's usage error. Ctrl-C ends as the shell names a program that SIGINT ended."""
_DEADLINE = "deadline_exceeded"  # the daemon's code for a request whose deadline passed
_GATEWAY_TIMEOUT = 504  # no target answered in its time


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
        for line in explain(msgspec.convert(document, RouteExplanation)):
            out.print(Text.assemble(*line), soft_wrap=True)

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
