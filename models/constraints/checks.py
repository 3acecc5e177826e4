"""A request's schemas, before a target that holds them by a grammar is asked."""

from __future__ import annotations

import asyncio
import re
from typing import Final

import msgspec

from router.errors import InvalidGrammar
from router.types import Request, Tool

from .json_schema import Fault, fault_of, held_arguments

_OBJECT: Final = '{"type":"object"}'
_AT_ONCE: Final = 4096  # characters of schemas that are checked on the event loop: about a millisecond


class HeldRequest(msgspec.Struct, frozen=True):
    """A request whose schemas can all be held.

    `loosened`: by tool that is only offered, and takes any arguments now, what of its schema cannot be held.
    """

    request: Request
    loosened: tuple[tuple[str, str], ...] = ()

    @property
    def names(self) -> str:
        """The loosened tools, for a response header."""
        return ",".join(re.sub(r"[^!-~]", "?", name) for name, _ in self.loosened)

    @property
    def detail(self) -> str:
        """The loosened tools and why, for a decision record; "" for none."""
        return "; ".join(f"the arguments of {name} are not held: {what}" for name, what in self.loosened)


async def hold(request: Request, *, calls_only: bool) -> HeldRequest:
    """Check the schemas that would constrain the answer to `request`; long ones in a thread.

    Args:
        request: the client's request.
        calls_only: the model answers with calls alone, so offered tools constrain it.

    Raises:
        InvalidGrammar: the response format, or a tool that must be called, cannot be held; with path and keyword.
    """
    form = "" if request.response_format is None else request.response_format.schema
    if len(form) + sum(len(tool.parameters) for tool in request.tools) > _AT_ONCE:
        return await asyncio.to_thread(hold_now, request, calls_only=calls_only)
    return hold_now(request, calls_only=calls_only)


def hold_now(request: Request, *, calls_only: bool) -> HeldRequest:
    """Do as `hold` does, on this thread."""
    form, choice = request.response_format, request.tool_choice
    must_call = choice.mode in ("required", "function")
    if form is not None and form.schema and not (must_call and request.tools) and (fault := fault_of(form.schema)):
        raise InvalidGrammar(f"`response_format`: {fault.message}", param="response_format")
    if choice.mode == "none" or not (must_call or (calls_only and form is None) or (form is not None and form.schema)):
        return HeldRequest(request)
    tools, loosened = list[Tool](), list[tuple[str, str]]()
    for tool in request.tools:
        called = choice.mode != "function" or tool.name == choice.name
        held = held_arguments(tool.parameters) if called and tool.parameters != "{}" else tool.parameters
        if isinstance(held, Fault):
            if must_call:
                raise InvalidGrammar(f"`tools`: the parameters of {tool.name}: {held.message}", param="tools")
            loosened.append((tool.name, f"{held.keyword} at {held.path}"))
            held = _OBJECT
        tools.append(tool if held is tool.parameters else msgspec.structs.replace(tool, parameters=held))
    return HeldRequest(msgspec.structs.replace(request, tools=tuple(tools)), tuple(loosened))
