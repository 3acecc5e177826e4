"""Agents at a device: sessions of scripted agents, whose models count what reaches them although it must not.

A device with a model of its own and two targets in two clouds; routes that differ from turn to turn by tags, so that
without sessions nearly every turn hops. Agents speak chat completions (whole and streamed, half of them with
`x-session-id`), Messages and chained Responses. Each turn of a user asks for up to four tools, one after the other.
Models make the ids of their calls, and know a result that another model asked for. In a fifth of the sessions one turn
is private; every later request repeats its words untagged, and a cloud that reads them counts it, and it is a leak if
a daemon has a record of the private turn, answered or refused: one that was cut before is unknown. Meanwhile targets
refuse and die, the device hands answers of low confidence off, and the daemon is closed and started again.

`choices` compares the order of `best_of` with and without `switch_cost`, in the decision alone: estimates drawn for
each turn, prices as published, and prefixes that grow by the turn.

    python -m tests.bench agents                     20,000 turns under `require`, and the comparison
    python -m tests.bench agents --turns 2000 --seed 3
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import tempfile
import textwrap
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
from aiohttp import web

from causeway_server.edge_node.backends.backend import BackendRequest
from causeway_server.edge_node.config.schema import CloudServer
from causeway_server.router.decision.decide import decide
from causeway_server.router.decision.sessions import answered, outcome_of
from causeway_server.router.errors import EngineCrashed, EngineUnavailable
from causeway_server.router.policy.compiled import parse_policy
from causeway_server.router.types import (
    Candidate,
    Chunk,
    Confidence,
    Estimates,
    Message,
    Request,
    Session,
    Snapshot,
    ToolCallDelta,
    Usage,
)
from tests.bench.rows import Row
from tests.edge_node.device import running as device_running
from tests.edge_node.scripted import ScriptedCloud, ScriptedEngine

POLICY = """
version: 1
name: agents
targets:
  small: {at: edge, model: m-small, first_token_timeout: 400ms}
  medium: {at: [cloud:a, cloud:b], model: m-medium, first_token_timeout: 400ms, timeout: 800ms}
  large: {at: cloud:a, model: m-large, first_token_timeout: 400ms, timeout: 800ms}
constraints: [{name: private-stays, when: '"private" in request.tags', keep: on_device}]
routes:
  - {name: hard, when: '"hard" in request.tags', use: [large, medium, small]}
  - {name: hot, when: '"hot" in request.tags', use: [medium, large, small]}
  - {name: unsure, when: '"unsure" in request.tags', use: [small, medium], handoff: {after_tokens: 1, below: 0.5}}
  - {name: otherwise, use: [small, medium, large]}
limits: {concurrent: 2000, queue: 2000}
"""
SESSION = "session: {pin: PIN, mode: MODE}\n"
Kind = Literal["history", "named", "messages", "chain"]
KINDS: Sequence[Kind] = ("history", "named", "messages", "chain")
SECRET = "the patient"
TAGS = ("", "hard", "hot", "unsure")
AT_ONCE = 12
_FAULTS = {"edge": 0.04, "cloud": 0.1}
_TRIES = 6
_TIMEOUT = aiohttp.ClientTimeout(total=5)


@dataclass
class Scripts:
    """What the models do, and what they saw that they must not see."""

    seed: int
    foreign: list[str] = field(default_factory=list)  # results of tools that another model asked for
    widened: list[str] = field(default_factory=list)  # agents whose private words a cloud read, by request
    known: set[str] = field(default_factory=set)  # tags of all requests that the daemons recorded
    served: int = 0
    faults: bool = True

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    @property
    def leaked(self) -> list[str]:
        """`widened` of the agents whose private request a daemon had read: it cannot know of others."""
        return [one for one in self.widened if f"agent-{one}" in self.known]

    def reply(self, model: str, asked: Sequence[str], text: str) -> str:
        """Return the id of the tool call of an answer, "" for one without.

        Args:
            asked: The ids of the tool results since the user's last words.
            text: These words, of which `tools=N` is the number of tools to call.
        """
        self.served += 1
        self.foreign += [one for one in asked[-1:] if not one.startswith(f"{model}.")]
        return f"{model}.{self.served}" if len(asked) < int(text.rpartition("tools=")[2] or 0) else ""

    def fault(self, at: str) -> str:
        if not self.faults or self._rng.random() >= _FAULTS[at]:
            return ""
        return self._rng.choice(("refuse", "die"))


class AgentEngine(ScriptedEngine):
    """The device's model. `scripts` are shared with the clouds."""

    def __init__(self, scripts: Scripts) -> None:
        super().__init__()
        self._scripts = scripts

    async def _answer(self, call: BackendRequest) -> AsyncIterator[Chunk]:
        self.calls.clear()
        fault = self._scripts.fault("edge")
        if self.refusal is not None:
            raise self.refusal
        if fault == "refuse":
            raise EngineUnavailable("no model is loaded", phase="connect")
        asked, text = _since_user(
            [(one.role, one.tool_call_id or "", str(one.content)) for one in call.request.messages]
        )
        call_id = self._scripts.reply("m-small", asked, text)
        sure = Confidence(1, 0.2 if self._scripts.served % 3 == 0 else 0.9, -0.1, 0.5, 0.2)
        if fault == "die":
            yield Chunk(text="I", tokens=1, confidence=sure)
            raise EngineCrashed("the child was killed", phase="stream")
        if call_id:
            yield Chunk(tool_calls=(ToolCallDelta(0, "{}", call_id, "look"),), tokens=1, confidence=sure)
            yield Chunk(finish_reason="tool_calls", usage=Usage(10, 2))
        else:
            yield Chunk(text="done", tokens=1, confidence=sure)
            yield Chunk(finish_reason="stop", usage=Usage(10, 2))


class AgentCloud(ScriptedCloud):
    """A cloud with the models m-medium and m-large."""

    def __init__(self, scripts: Scripts) -> None:
        super().__init__()
        self._scripts = scripts

    async def _answer(self, request: web.Request, body: dict[str, object]) -> web.StreamResponse:
        self.bodies.clear()
        self.request_headers.clear()
        if self.status != 200:
            return web.json_response({"error": {"message": "broken"}}, status=self.status)
        scripts, model = self._scripts, str(body["model"])
        scripts.widened += re.findall(rf"{SECRET} (\d*)", json.dumps(body))[:1]
        fault = scripts.fault("cloud")
        assert request.transport is not None
        if fault == "refuse":
            request.transport.abort()
            raise asyncio.CancelledError
        messages: Any = body["messages"]
        asked, text = _since_user(
            [(one["role"], one.get("tool_call_id", ""), str(one.get("content"))) for one in messages]
        )
        call_id = scripts.reply(model, asked, text)
        message: dict[str, object] = {"role": "assistant", "content": None if call_id else "done"}
        if call_id:
            function = {"name": "look", "arguments": "{}"}
            message["tool_calls"] = [{"index": 0, "id": call_id, "type": "function", "function": function}]
        choice = {"index": 0, "finish_reason": "tool_calls" if call_id else "stop"}
        whole = {"id": "x", "created": 1, "model": model, "usage": {"prompt_tokens": 10, "completion_tokens": 2}}
        if not body.get("stream"):
            answer = {**whole, "object": "chat.completion", "choices": [{**choice, "message": message}]}
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        event = {**whole, "object": "chat.completion.chunk", "choices": [{**choice, "delta": message}]}
        if fault == "die":
            event["choices"] = [{"index": 0, "finish_reason": None, "delta": {"role": "assistant", "content": "I"}}]
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
        if fault == "die":
            request.transport.abort()
            raise asyncio.CancelledError
        await response.write(b"data: [DONE]\n\n")
        return response


def _since_user(messages: Sequence[tuple[str, str, str]]) -> tuple[list[str], str]:
    """Return the ids of the tool results since the user's last words, and these words."""
    asked: list[str] = []
    for role, call_id, text in reversed(messages):
        if role == "user":
            return asked[::-1], text
        asked += [call_id] if role == "tool" else []
    return asked[::-1], ""


@dataclass
class Agent:
    """One session of an agent.

    Attributes:
        history: What its client has sent and received, in its dialect; of a chain, what is to be sent next.
    """

    kind: Kind
    number: int
    rng: random.Random
    history: list[dict[str, object]] = field(default_factory=list)
    previous: str = ""
    call_id: str = ""

    def say(self, text: str) -> None:
        """Append the user's words, or the result of the tool that was asked for."""
        if not self.call_id:
            self.history.append({"role": "user", "content": text})
        elif self.kind == "messages":
            result = {"type": "tool_result", "tool_use_id": self.call_id, "content": "found"}
            self.history.append({"role": "user", "content": [result]})
        elif self.kind == "chain":
            self.history.append({"type": "function_call_output", "call_id": self.call_id, "output": "found"})
        else:
            self.history.append({"role": "tool", "tool_call_id": self.call_id, "content": "found"})

    async def ask(self, http: aiohttp.ClientSession, tags: str) -> tuple[int, str]:
        """Send the turn. Return the status, and the error's code or the value of the session's header."""
        headers = {"x-causeway-tags": tags} if tags else {}
        stream = self.kind in ("history", "named") and self.rng.random() < 0.5
        path, body = self.request(headers, stream=stream)
        try:
            async with http.post(path, json=body, headers=headers, timeout=_TIMEOUT) as response:
                data = await response.read()
                if response.status != 200:
                    return response.status, _code(data)
                if not self.take(data, stream=stream):
                    return 502, "broken"
                return 200, response.headers.get("x-causeway-session", "").partition(";")[0]
        except (aiohttp.ClientError, TimeoutError, RuntimeError):  # also: the client's session was closed
            return 502, "cut"

    def request(self, headers: dict[str, str], *, stream: bool) -> tuple[str, dict[str, object]]:
        schema = {"type": "object", "properties": {}}
        if self.kind == "messages":
            headers["anthropic-version"] = "2023-06-01"
            tools: list[object] = [{"name": "look", "input_schema": schema}]
            return "/v1/messages", {"model": "auto", "max_tokens": 64, "messages": self.history, "tools": tools}
        if self.kind == "chain":
            chain = {"previous_response_id": self.previous} if self.previous else {}
            tools = [{"type": "function", "name": "look", "parameters": schema}]
            return "/v1/responses", {"model": "auto", "input": self.history, "store": True, "tools": tools, **chain}
        if self.kind == "named":
            headers["x-session-id"] = f"session {self.number}"
        tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
        return "/v1/chat/completions", {"model": "auto", "messages": self.history, "tools": tools, "stream": stream}

    def take(self, data: bytes, *, stream: bool) -> bool:
        """Append the answer. Return False for a stream that broke."""
        if stream:
            lines = [line[6:] for line in data.decode().splitlines() if line.startswith("data: ")]
            if lines[-1] != "[DONE]":
                return False
            deltas = [choice["delta"] for line in lines[:-1] for choice in json.loads(line).get("choices", [])]
            calls = [call for delta in deltas for call in delta.get("tool_calls") or []]
            text = "".join(delta.get("content") or "" for delta in deltas)
            message: dict[str, object] = {"role": "assistant", "content": text}
        else:
            answer = json.loads(data)
            if self.kind == "messages":
                self.call_id = next((one["id"] for one in answer["content"] if one["type"] == "tool_use"), "")
                self.history.append({"role": "assistant", "content": answer["content"]})
                return True
            if self.kind == "chain":
                self.previous, self.history = answer["id"], []
                called = [one["call_id"] for one in answer["output"] if one["type"] == "function_call"]
                self.call_id = called[0] if called else ""
                return True
            message = answer["choices"][0]["message"]
            calls = answer["choices"][0]["message"].get("tool_calls") or []
        if calls:
            message["tool_calls"] = [{key: value for key, value in one.items() if key != "index"} for one in calls]
        self.call_id = calls[0]["id"] if calls else ""
        self.history.append(message)
        return True


def _code(data: bytes) -> str:
    error = json.loads(data)["error"]
    return str(error.get("code") or error["type"])


@dataclass
class Bed:
    """The device now, and what became of turns and sessions."""

    seed: int
    turns: int
    ended: Counter[str] = field(default_factory=Counter)
    up: asyncio.Event = field(default_factory=asyncio.Event)
    http: aiohttp.ClientSession | None = None

    @property
    def done(self) -> bool:
        return self.ended["turns"] >= self.turns

    async def session(self, number: int) -> None:
        """Run one agent's session, and count its turns by what became of them."""
        rng = random.Random(f"{self.seed}/{number}")
        agent = Agent(KINDS[number % len(KINDS)], number, rng)
        length = rng.randint(2, 6)
        secret_at = rng.randrange(length) if rng.random() < 0.2 else -1
        for turn in range(length):
            # Half of the sessions begin as others do, so that histories are equal for some turns.
            words = f"task {number if number // 4 % 2 else rng.randrange(4)}.{turn} tools={rng.randint(0, 4)}"
            agent.call_id, tags = "", rng.choice(TAGS)
            if turn == secret_at:
                words, tags = f"{SECRET} {number} {words}", f"private,agent-{number},{tags}".rstrip(",")
            answered = False
            while not answered:
                agent.say(words)
                if not await self._turn(agent, tags):
                    self.ended["sessions given up"] += 1
                    return
                tags, answered = rng.choice(TAGS), not agent.call_id
        self.ended["sessions"] += 1

    async def _turn(self, agent: Agent, tags: str) -> bool:
        for attempt in range(_TRIES):
            await self.up.wait()
            assert self.http is not None
            status, how = await agent.ask(self.http, tags)
            self.ended["turns"] += 1
            self.ended[how] += 1
            if status in (200, 404):  # 404: private responses are gone after a restart
                return status == 200
            tags = agent.rng.choice(TAGS)  # the next attempt is not tagged as private any more
            await asyncio.sleep(0.02 * attempt)
        return False

    async def work(self, numbers: Iterator[int]) -> None:
        while not self.done:
            await self.session(next(numbers))


async def run(
    turns: int, seed: int, policy: str, *, each: int = 1000, faults: bool = True
) -> tuple[Scripts, Counter[str]]:
    """Run so many turns at least; the daemon is closed and started again after each `each` turns."""
    scripts, bed, numbers = Scripts(seed, faults=faults), Bed(seed, turns), itertools.count()
    with tempfile.TemporaryDirectory(prefix="agents-") as folder:
        async with asyncio.TaskGroup() as tasks:
            workers = [tasks.create_task(bed.work(numbers)) for _ in range(AT_ONCE)]
            while not all(worker.done() for worker in workers):
                clouds = [AgentCloud(scripts), AgentCloud(scripts)]
                for cloud in clouds:
                    await cloud.start()
                names = {name: CloudServer(url=cloud.url) for name, cloud in zip("ab", clouds, strict=True)}
                engine, until = AgentEngine(scripts), bed.ended["turns"] + each
                daemon = device_running(Path(folder), policy=policy, engine=engine, cloud=clouds[0], clouds=names)
                async with daemon as device:
                    bed.http = device.session
                    bed.up.set()
                    while bed.ended["turns"] < until and not all(worker.done() for worker in workers):
                        await asyncio.sleep(0.01)
                    bed.up.clear()
                records = device.parts.decisions.memory.values()
                scripts.known |= {tag for record in records for tag in record.request.tags}
                await clouds[1].stop()
                bed.ended["starts"] += 1
    return scripts, bed.ended


# --- the choice -------------------------------------------------------------------------------------------------------

CHOICE = """
version: 1
name: choice
targets:
  small:  {at: edge, model: s}
  medium: {at: cloud, model: m, price: {input: 0.25, cached_input: 0.025, output: 2}}
  large:  {at: cloud, model: l, price: {input: 1.25, cached_input: 0.125, output: 10}}
routes:
  - {name: best, use: {best_of: [small, medium, large], weights: {quality: 1, usd: USD, latency: 0.02}}}
"""
COST = "session: {switch_cost: prefix}\n"


def choices(turns: int, seed: int, policy_text: str) -> Counter[str]:
    """Let `decide` choose for so many turns of sessions, and count switches and lost tokens.

    A session begins with 2,000 to 8,000 tokens, and a turn adds 200 to 1,000. Quality is that of the session's task,
    with an error of the estimate from turn to turn (standard deviation 0.08); times vary by a third.
    """
    policy, rng, found = parse_policy(policy_text), random.Random(seed), Counter[str]()
    while found["turns"] < turns:
        known, tokens = Session(), rng.randint(2000, 8000)
        ease = rng.random()
        quality = {"s": 0.35 + 0.5 * ease, "m": 0.55 + 0.35 * ease, "l": 0.75 + 0.2 * ease}
        for turn in range(rng.randint(5, 60)):
            candidates = tuple(
                Candidate(
                    "edge" if model == "s" else "cloud",
                    model,
                    quality=min(1.0, max(0.0, rng.gauss(quality[model], 0.08))),
                    answer_tokens=200.0,
                    latency_s=seconds * rng.uniform(0.67, 1.33),
                )
                for model, seconds in (("s", 4.0), ("m", 2.0), ("l", 3.0))
            )
            estimates = Estimates(prompt_tokens=tokens, candidates=candidates, session=known)
            request = Request(kind="chat", model="auto", messages=(Message("user", "next"),))
            decision = decide(policy, request, Snapshot(), estimates)
            target = decision.attempts[0].target
            outcome = outcome_of(known, decision, target.name, target.served, "")
            price = target.price.rates[0], target.price.rates[1]
            warm = min(known.warm.get(target.name, 0), tokens)
            found["pico_usd"] += (tokens - warm) * price[0] + warm * price[1] + 200 * target.price.rates[2]
            found["quality"] += round(1000 * quality[target.model])
            found["turns"] += 1
            found["switches"] += outcome.status == "switched"
            found["lost"] += outcome.lost_tokens
            found["first"] += turn == 0
            known, tokens = answered(known, target, tokens + 200, 0.0), tokens + 200 + rng.randint(200, 1000)
    return found


def compared(turns: int, seed: int, usd: float = 20.0) -> tuple[list[Row], str]:
    """Compare the choices with and without `switch_cost`. Return rows, and a table."""
    text = CHOICE.replace("USD", f"{usd:g}")
    without, with_cost = choices(turns, seed, text + "session: {}\n"), choices(turns, seed, text + COST)
    lines = [
        f"{name:>12}: {one['switches']:6} switches in {one['turns']} turns, {one['lost']} warm tokens lost, "
        f"{one['pico_usd'] / 1e12:.2f} USD, mean quality {one['quality'] / 1000 / one['turns']:.3f}"
        for name, one in (("without", without), ("switch_cost", with_cost))
    ]
    fewer = 1.0 - with_cost["switches"] / without["switches"]
    lost = 1.0 - with_cost["lost"] / without["lost"]
    rows = [
        Row(
            "changes of model that `switch_cost` avoids, as a share of those without it",
            fewer,
            "",
            0.7,
            better="higher",
        ),
        Row(
            "prefix tokens that stay cached thanks to `switch_cost`, as a share of those lost without it",
            lost,
            "",
            0.0,
            better="higher",
        ),
    ]
    return rows, "\n".join(lines)


async def measure(turns: int, seed: int) -> list[Row]:
    """Measure both parts. The same load under `prefer` shows that the models see what they count."""
    policy = POLICY + SESSION.replace("PIN", "tool_loop")
    scripts, ended = await run(turns, seed, policy.replace("MODE", "require"))
    ended["private in a cloud, not read by a daemon before"] = len(scripts.widened) - len(scripts.leaked)
    told = f"require: {dict(sorted(ended.items()))}, {scripts.served} answers of models"
    print(textwrap.fill(told, 118), flush=True)
    loose, loosely = await run(min(turns, 2000), seed, POLICY)
    print(f"no session: {dict(sorted(loosely.items()))}", flush=True)
    rows, lines = compared(turns, seed)
    print(lines)
    return [
        Row("turns", ended["turns"], "", turns, better="higher"),
        Row("tool results that reached another model", len(scripts.foreign), "", 0.0),
        Row("private requests that reached a cloud", len(scripts.leaked), "", 0.0),
        Row("private turns that a daemon read", len(_private(scripts)), "", 1.0, better="higher"),
        Row("sessions that ran to their end", ended["sessions"], "", 1.0, better="higher"),
        Row("without `session`: tool results that reached another model", len(loose.foreign), "", 1.0, better="higher"),
        Row("without `session`: private requests that reached a cloud", len(loose.leaked), "", 1.0, better="higher"),
        *rows,
    ]


def _private(scripts: Scripts) -> list[str]:
    return [tag for tag in scripts.known if tag.startswith("agent-")]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=20_000, help="requests of agents, repeated ones included")
    parser.add_argument("--seed", type=int, default=2, help="of the agents, the faults and the estimates")


async def main(options: argparse.Namespace) -> list[Row]:
    return await measure(options.turns, options.seed)
