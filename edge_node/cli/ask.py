"""`causeway-edge ask` and `route`: one question to the daemon that runs, through the SDK."""

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

from .explain import Explained, render

ANSWERED, REFUSED, UNREACHABLE, TOO_LATE, BROKEN = 0, 1, 3, 4, 5
"""Exit codes; 2 is click's, for a command line that is wrong, and 130 is Ctrl-C."""


def ask(
    causeway: Causeway,
    text: str,
    asked: RequestOptions,
    *,
    stream: bool = True,
    as_json: bool = False,
    out: TextIO,
    console: Console,
) -> int:
    """The answer to `out`, as it comes; where it came from to the console (stderr). Returns the exit code."""

    def work() -> None:
        if as_json:
            answer = causeway.chat(text, stream=True, **asked).answer() if stream else causeway.chat(text, **asked)
            out.write(_json(answer))
        elif stream:
            _stream(causeway, text, asked, out, console)
        else:
            _whole(causeway.chat(text, **asked), out, console)

    return _told(work, console)


def route(
    causeway: Causeway, text: str, asked: RequestOptions, *, as_json: bool = False, out: Console, console: Console
) -> int:
    """What would happen to this question, without running it. Returns the exit code."""

    def work() -> None:
        document = causeway.route(text, **asked)
        if as_json:
            out.print_json(json.dumps(document))
            return
        out.print(render(msgspec.convert(document, Explained)))

    return _told(work, console)


def _stream(causeway: Causeway, text: str, asked: RequestOptions, out: TextIO, console: Console) -> None:
    with causeway.chat(text, stream=True, **asked) as stream:
        try:
            for piece in stream:
                if piece.index == 0:
                    out.write(piece.text)
                    out.flush()
        finally:
            out.write("\n")
        answer = stream.answer()
    _calls(answer, out)
    console.print(_line(answer), soft_wrap=True)


def _whole(answer: Answer, out: TextIO, console: Console) -> None:
    out.write(answer.text + "\n")
    _calls(answer, out)
    console.print(_line(answer), soft_wrap=True)


def _calls(answer: Answer, out: TextIO) -> None:
    out.writelines(f"{call.name}({call.arguments})\n" for call in answer.tool_calls)


def _line(answer: Answer) -> Text:
    """Where the answer came from and why, on one line."""
    decision = answer.decision
    first = decision.first_token_ms
    parts = (
        " → ".join(part for part in (decision.route, decision.target) if part),
        f"because {decision.reason}" if decision.reason else "",
        f"cache {decision.cache}" if decision.cache else "",
        "degraded" if decision.degraded else "",
        f"first token {first:.1f} ms" if first is not None else "",
        f"total {answer.total_ms:.1f} ms",
        f"{answer.usage.completion_tokens} tokens" if answer.usage.completion_tokens else "",
        decision.policy,
        decision.id,
    )
    return Text(" · ".join(part for part in parts if part), style="dim")


def _json(answer: Answer) -> str:
    document = {
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "tool_calls": [asdict(call) for call in answer.tool_calls],
        "model": answer.model,
        "usage": asdict(answer.usage),
        "decision": asdict(answer.decision),
        "total_ms": round(answer.total_ms, 3),
    }
    return json.dumps(document, ensure_ascii=False) + "\n"


def _told(work: Callable[[], None], console: Console) -> int:
    """Do it, and turn what may go wrong into words and an exit code."""
    try:
        work()
    except CausewayError as error:
        said, code = _words(error)
        console.print(Text(said[0], style="red"))
        for line in said[1:]:
            console.print(Text(line))
        return code
    return ANSWERED


def _words(error: CausewayError) -> tuple[list[str], int]:
    if isinstance(error, CausewayUnreachable):
        return [str(error), "Is the daemon running? `causeway-edge serve` starts it."], UNREACHABLE
    if isinstance(error, CausewayTimeout):
        return [str(error)], TOO_LATE
    if isinstance(error, CausewayConnectionBroken):
        return [str(error)], BROKEN
    if not isinstance(error, CausewayAPIError):
        return [str(error)], REFUSED
    lines = [f"{error.status} {error.code}: {error.message}"]
    if error.retry_after_s is not None:
        lines.append(f"Try again in {error.retry_after_s:g} s.")
    if error.decision is not None and error.decision.id:
        lines.append(f"decision {error.decision.id}")
    return lines, REFUSED
