"""`python -m tests.bench schemas-served`: answers under generated schemas, through a real daemon and a real gateway.

A model answers at temperature 1.5 on the device, and in a real Triton behind the gateway, with the schemas that
generators made (`tests/models/constraints/schemas`), in turn as response format and as the arguments of a forced call.
Every answer with status 200 that was not cut must be valid for `jsonschema`, formats included (its extra `format`).

Most schemas leave some strings and lists without a bound, and at that temperature a model seldom ends one. Thus the bed
asks for the schemas with bounds of its own where they have none (BOUNDS), unless `--unbounded` is given.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
from jsonschema import Draft202012Validator

from causeway_server.models.constraints.grammars import enforceable_arguments, fault_of
from tests.bench.rows import Row
from tests.models.constraints.bytewise import CORPUS
from tests.stack import TOKEN, Stack

POLICY = """
version: 1
name: schemas
targets:
  edge: {{at: edge, model: {model}, first_token_timeout: 5m, timeout: 10m}}
routes: [{{name: all, use: [edge]}}]
"""
TIERS = "tiers: [{{name: {model}, concurrency: 4, max_queued: 64}}]\n"
BOUNDS = {"string": ("maxLength", 16), "array": ("maxItems", 1)}
LONG = 40  # characters of a string with a pattern, an address or a link
FIXED = {"date-time", "date", "time", "duration", "uuid", "ipv4", "ipv6", "hostname"}
ANY = {"type": ["string", "integer", "boolean", "null"], "maxLength": 16}
_DEADLINE_S = 600.0
Counts = collections.Counter[str]


def bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with BOUNDS wherever it has none: free strings, lists, other properties."""
    copied = copy.deepcopy(schema)
    for part in _schemas(copied):
        for name, member in part.get("properties", {}).items():
            if member == {}:
                part["properties"][name] = dict(ANY)
        types = part.get("type", ())
        for kind in [types] if isinstance(types, str) else types:
            key, most = BOUNDS.get(kind, ("", 0))
            if (
                key
                and key not in part
                and not {"enum", "const", "$ref"} & part.keys()
                and part.get("format") not in FIXED
            ):
                most = LONG if {"pattern", "format"} & part.keys() else most
                part[key] = max(most, part.get(key.replace("max", "min"), 0))
            if "patternProperties" in part and not part.get("properties"):
                part["maxProperties"] = 3
            if kind == "object" and part.get("additionalProperties", False) is not False:
                if part.get("properties") or "patternProperties" in part:
                    part["additionalProperties"] = False
                else:
                    part |= {"propertyNames": {"pattern": "^[a-z]{1,8}$"}, "maxProperties": 3}
            if kind == "object" and part.get("properties") == {}:
                part["additionalProperties"] = False
    return copied


def _schemas(value: object) -> list[dict[str, Any]]:
    """Return every object inside a schema; one that is no schema has no `type` of the three that matter."""
    if isinstance(value, list):
        return [found for item in value for found in _schemas(item)]
    if not isinstance(value, dict):
        return []
    return [value, *(found for key, item in value.items() if key != "propertyNames" for found in _schemas(item))]


class Side:
    """A server that answers."""

    def __init__(self, name: str, url: str, model: str, max_tokens: int) -> None:
        self.name = name
        self._url = f"{url}/v1/chat/completions"
        self._model = model
        self._max_tokens = max_tokens

    async def ask(self, session: aiohttp.ClientSession, schema: dict[str, Any], called: bool, seed: int) -> str:
        """Return the verdict on one answer: `valid`, `cut`, `INVALID`, or the status that it had instead."""
        body: dict[str, Any] = {"model": self._model, "messages": [{"role": "user", "content": "go"}]}
        body |= {"temperature": 1.5, "seed": seed, "max_tokens": self._max_tokens}
        if called:
            body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
            body["tool_choice"] = {"type": "function", "function": {"name": "f"}}
        else:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        while True:
            async with session.post(self._url, json=body) as response:
                answer = await response.json()
            if response.status != 429:
                break
            await asyncio.sleep(1.0)  # the server is slower than the bed
        if response.status != 200:
            return f"status {response.status}: {answer['error']['message']}"
        choice = answer["choices"][0]
        if choice["finish_reason"] == "length":
            return "cut"
        message = choice["message"]
        if called and not message.get("tool_calls"):
            return f"INVALID: not a call: {json.dumps(schema)}: {answer}"
        text = message["tool_calls"][0]["function"]["arguments"] if called else message["content"]
        try:
            fault = next(_validator(schema).iter_errors(json.loads(text)), None)
        except ValueError as error:
            return f"INVALID: {error}: {text!r}"
        return "valid" if fault is None else f"INVALID: {fault.message}: {json.dumps(schema)}: {text}"


def _validator(schema: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)


async def ask_all(sides: list[Side], answers: int, at_once: int, unbounded: bool) -> dict[str, Counts]:
    """Ask in turn: a side, as format or call, a schema. Returns the verdicts by side and form."""
    held = [schema for schema in CORPUS.values() if fault_of(json.dumps(schema)) is None]
    formats = held if unbounded else [bounded(schema) for schema in held]
    calls = [schema for schema in formats if isinstance(enforceable_arguments(json.dumps(schema)), str)]
    cut: Counts = Counts()
    found: dict[str, Counts] = collections.defaultdict(Counts)
    places = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        side, called = sides[number % len(sides)], bool(number // len(sides) % 2)
        schemas = calls if called else formats
        schema = schemas[number // len(sides) // 2 % len(schemas)]
        async with places:
            verdict = await side.ask(session, schema, called, number)
        if verdict not in ("valid", "cut"):
            print(f"{side.name}: {verdict}", flush=True)
        if verdict == "cut":
            cut[json.dumps(schema)[:100]] += 1
        if (done := 1 + sum(each.total() for each in found.values())) % 50 == 0:
            print(f"{done} of {answers} answers", file=sys.stderr, flush=True)
        found[f"{side.name}, {'call' if called else 'format'}"][verdict.partition(":")[0]] += 1

    headers = {"authorization": f"Bearer {TOKEN}"}
    timeout = aiohttp.ClientTimeout(total=_DEADLINE_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session, asyncio.TaskGroup() as tasks:
        for number in range(answers):
            tasks.create_task(one(number))
    for text, times in cut.most_common(8):
        print(f"cut {times} times: {text}")
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="assistant", help="on the device")
    parser.add_argument("--large", default="assistant-large", help="in Triton")
    parser.add_argument("--answers", type=int, default=3000)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=400, help="of an answer; a longer one is cut")
    parser.add_argument("--unbounded", action="store_true", help="the schemas as they are")


def main(given: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="schemas-") as folder:
        stack = Stack(Path(folder))
        policy = Path(folder, "policy.yaml")
        policy.write_text(POLICY.format(model=given.model))
        try:
            others = () if given.large == "assistant-large" else ("--model", given.large)
            stack.start_triton(*others, "--threads", "1").ready()
            stack.start_gateway(config=TIERS.format(model=given.large)).ready()
            limits = f"default_deadline_s: {_DEADLINE_S:g}"
            stack.start_edge(f"policy: {policy}\nengine: {{threads: 1}}\n", server=limits).ready()
            stack.wait_until_loaded()
            sides = [
                Side("edge", stack.edge_url, "edge", given.max_tokens),
                Side("gateway", stack.gateway_url, given.large, given.max_tokens),
            ]
            found = asyncio.run(ask_all(sides, given.answers, given.at_once, given.unbounded))
        finally:
            stack.close()
    total = sum(found.values(), Counts())
    for name, counts in sorted(found.items()):
        print(f"{name}: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    wrong = sum(count for verdict, count in total.items() if verdict not in ("valid", "cut"))
    cut = 100 * total["cut"] / total.total()
    return [
        Row("answers that are not valid", wrong, "", 0.0),
        Row("answers that were cut", cut, "%", 5.0, note=f"{total['cut']} of {total.total()}"),
    ]
