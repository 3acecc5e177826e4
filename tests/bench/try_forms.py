"""Have a model of real weights write required calls in the form of every family, and read them again.

    python -m tests.bench.try_forms ~/.local/share/causeway/models/qwen-05b/model.gguf

Asks for two things in one message. Prints a row per form and request: required with and without parallel calls, and a
named function. A grammar of the form constrains the answer; which calls come, and with which arguments, is the model's.
"""

from __future__ import annotations

import json
import sys

import msgspec

from causeway_server.models.llama_cpp.protocol import EngineOptions, Prompt
from causeway_server.router.tool_calls.parser import ToolCallParser
from causeway_server.router.tool_calls.schema import (
    GEMMA,
    HERMES,
    LLAMA,
    MISTRAL,
    PHI,
    PLAIN,
    ToolFormat,
    answer_schema,
    call_frame,
)
from causeway_server.router.types import Message, Request, Sampling, Tool, ToolChoice
from tests.models.llama_cpp.conftest import Rig
from tests.tool import run_tool


def _parameters(**properties: str) -> str:
    kinds = {name: {"type": kind} for name, kind in properties.items()}
    return json.dumps({"type": "object", "properties": kinds, "required": [*kinds], "additionalProperties": False})


REQUIRED = Request(
    kind="chat",
    model="m",
    messages=(Message("user", "Turn on the lamp in the hall, and set the fan to 3."),),
    tools=(
        Tool("lamp", "Turn a lamp on or off.", _parameters(room="string", on="boolean")),
        Tool("fan", "Set a fan's speed.", _parameters(speed="integer")),
    ),
    tool_choice=ToolChoice("required"),
)
REQUESTS = {
    "required": REQUIRED,
    "required, one": msgspec.structs.replace(REQUIRED, parallel_tool_calls=False),
    "fan": msgspec.structs.replace(REQUIRED, tool_choice=ToolChoice("function", "fan")),
}


def calls_of(rig: Rig, form: ToolFormat, request: Request) -> str:
    """Return the calls that the model made, as `name arguments`, and any text that is none."""
    answer = rig.run(
        Prompt(messages=request.messages, tools=request.tools),
        json_schema=answer_schema(request, form=form),
        call_frame=call_frame(request, form),
        sampling=Sampling(temperature=0.0),
        max_tokens=160,
    )
    parser = ToolCallParser(request)
    text, calls = parser.feed(answer.text)
    rest, more = parser.finish()
    return "; ".join([f"{call.name} {call.arguments}" for call in (*calls, *more)]) + text + rest


def main(path: str) -> None:
    rig = Rig(EngineOptions(model_path=path, context_tokens=1024, sequences=1))
    try:
        for form in (PLAIN, HERMES, LLAMA, MISTRAL, PHI, GEMMA):
            for name, request in REQUESTS.items():
                print(f"{form.family:8} {name:14} {calls_of(rig, form, request)}", flush=True)
    finally:
        rig.engine.close()


if __name__ == "__main__":
    sys.exit(run_tool(lambda: main(sys.argv[1])))
