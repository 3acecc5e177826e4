"""`python -m tests.bench schemas [SUITE] [--model NAME]`: schemas against the answers that their grammars allow.

SUITE is the folder `json` of the source distribution of PyPI's jsonschema (`pip download --no-deps --no-binary :all:
jsonschema==4.26.0`), which carries the JSON-Schema-Test-Suite under its own licence. Of each group of draft 2020-12,
formats included, the schema is accepted or refused with path and keyword; instances that are not valid must not be
answers, and random answers must be valid. With `--model` that model answers, at temperature 1.5, with the schemas that
generators made (`tests/models/constraints/schemas`), as response formats and as calls. Formats are checked if the extra
`format` of jsonschema is installed.
"""

from __future__ import annotations

import argparse
import collections
import json
from pathlib import Path
from random import Random
from typing import Any

from jsonschema import Draft202012Validator

from causeway_server.models.catalog.artifact import find_artifact
from causeway_server.models.constraints.grammars import fault_of
from causeway_server.models.llama_cpp.protocol import EngineOptions, Prompt
from causeway_server.router.tool_calls.schema import NO_FRAME, ToolFormat, answer_schema, call_frame
from causeway_server.router.types import Message, Request, Sampling, Tool, ToolChoice
from tests.bench.rows import Row
from tests.models.constraints.bytewise import CORPUS, accepts, draw, matcher
from tests.models.llama_cpp.conftest import Answer, Rig

_AT_ONCE = 64  # jobs in the engine


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("suite", type=Path, nargs="?", help="without it, only --model is asked")
    parser.add_argument("--draws", type=int, default=8, help="answers drawn for each accepted schema")
    parser.add_argument("--model", default="", help="a model that answers with the generated schemas, hot")
    parser.add_argument("--answers", type=int, default=3000, help="of the model")


def main(arguments: argparse.Namespace) -> list[Row]:
    counts: collections.Counter[str] = collections.Counter()
    if arguments.suite is not None:
        _suite(arguments.suite / "tests" / "draft2020-12", arguments.draws, counts)
    if arguments.model:
        _sampled(arguments.model, arguments.answers, counts)
    print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    return [Row(f"{name} answers", counts[name], "", 0.0) for name in ("loose", "invalid")]


def _suite(folder: Path, draws: int, counts: collections.Counter[str]) -> None:
    faults: collections.Counter[str] = collections.Counter()
    for path in (*sorted(folder.glob("*.json")), *sorted((folder / "optional" / "format").glob("*.json"))):
        for group in json.loads(path.read_text()):
            if isinstance(group["schema"], dict):
                _try(group, draws, counts, faults, f"{path.stem}: {group['description']}")
    print("refused for " + ", ".join(f"{keyword} {count}" for keyword, count in faults.most_common()))


def _sampled(model: str, answers: int, counts: collections.Counter[str]) -> None:
    """Ask for the generated schemas in turn, as a response format and as the arguments of a forced call."""
    schemas = [schema for schema in CORPUS.values() if fault_of(json.dumps(schema)) is None]
    rig = Rig(EngineOptions(model_path=str(find_artifact(model).path), sequences=8))
    form = rig.engine.info.tool_format
    jobs: list[tuple[int, dict[str, Any], bool]] = []
    for number in range(answers):
        schema, called = schemas[number // 2 % len(schemas)], bool(number % 2)
        tool = Tool("f", parameters=json.dumps(schema))
        choice = ToolChoice("function", "f")
        request = Request(kind="chat", model="m", messages=(Message("user", "go"),), tools=(tool,), tool_choice=choice)
        jobs.append(
            (
                rig.start(
                    Prompt(messages=request.messages),
                    json_schema=answer_schema(request, form=form) if called else json.dumps(schema),
                    call_frame=call_frame(request, form) if called else NO_FRAME,
                    sampling=Sampling(temperature=1.5, seed=number),
                    max_tokens=400,
                ),
                schema,
                called,
            )
        )
        if len(jobs) == _AT_ONCE or number == answers - 1:
            for job, expected, is_call in jobs:
                _judge(rig.answer(job), expected, is_call, form, counts)
            jobs.clear()
    rig.engine.close()


def _judge(
    answer: Answer, schema: dict[str, Any], is_call: bool, form: ToolFormat, counts: collections.Counter[str]
) -> None:
    if answer.end.finish_reason != "stop":
        counts[answer.end.error or "answers cut"] += 1
        return
    counts["answers"] += 1
    text = answer.text
    if is_call:
        frame = form.frame_of(several=False)
        text = text.removeprefix(frame.before).removesuffix(frame.after)
    value = json.loads(text)
    value = value[form.arguments_key] if is_call else value
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    if not validator.is_valid(value):
        counts["invalid"] += 1
        print(f"{json.dumps(schema)}: {answer.text}")


def _try(
    group: dict[str, Any], draws: int, counts: collections.Counter[str], faults: collections.Counter[str], name: str
) -> None:
    schema, wraps = group["schema"], "$ref" not in json.dumps(group["schema"]) and "$id" not in group["schema"]
    if wraps:  # a property, since an answer without a type is an object
        schema = {"type": "object", "properties": {"s": schema}, "required": ["s"], "additionalProperties": False}
    if (fault := fault_of(json.dumps(schema))) is not None:
        counts["refused"] += 1
        faults[fault.keyword] += 1
        return
    counts["accepted"] += 1
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    for test in group["tests"]:
        value = {"s": test["data"]} if wraps else test["data"]
        if not test["valid"] and not validator.is_valid(value) and accepts(schema, value):
            counts["loose"] += 1
            print(f"{name}: accepts {test['data']!r}")
    start, chance = matcher(schema), Random(name)
    for answer in (draw(start, chance) for _ in range(draws)):
        counts["cut" if answer is None else "drawn"] += 1
        if answer is not None and not validator.is_valid(json.loads(answer)):
            counts["invalid"] += 1
            print(f"{name}: {answer}")
