"""`causeway-edge route --policy FILE`: try a draft of a policy, without a daemon."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from router.checks.draft import try_draft
from router.checks.explanation import explain
from router.errors import ConfigError, ModelNotFound
from router.policy.compiled import check_policy
from router.types import NowSignals

OK, FAILED, USAGE = 0, 1, 2


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
    try:
        text = path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        console.print(Text(f"{path}: {error.strerror}", "red"), soft_wrap=True)
        return USAGE
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
        return USAGE if isinstance(error, ConfigError) else FAILED
    if as_json:
        out.print_json(msgspec.json.encode(explanation).decode())
        return OK
    for line in explain(explanation):
        out.print(Text.assemble(*line), soft_wrap=True)
    return OK
