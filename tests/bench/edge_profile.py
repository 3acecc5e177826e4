"""`python -m tests.bench profile [--write]`: how the mechanisms of the edge share the processor time of a request.

A daemon runs with a stopwatch around the functions of each mechanism, which stops while a function of another one runs.
A figure is the time of a request that no other function of the table takes. The stopwatches' own cost is taken off by
their number: it is what the daemon takes more than one without them. What is left of the total is the event loop, the
kernel's reads and writes, and functions that the table does not name. `--write` keeps the table in PROFILE.md.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import inspect
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import coroutine
from typing import Any, NamedTuple

import msgspec
import psutil

from tests.bed.figures import table
from tests.ports import free_port
from tests.tool import run_tool

from .peers.__main__ import GAP_US, MANY, TOKENS, load_from, upstream
from .peers.load import HIT_PROMPTS, Plan, Scenario
from .peers.programs import Programs, set_up
from .peers.servers import Start, running
from .results import origin, with_section

PROFILE = Path(__file__).with_name("PROFILE.md")
TITLE = "## The edge: what each mechanism takes of a request"
OFF = "trace (off by default)"
MECHANISMS: Mapping[str, tuple[str, ...]] = {
    "connection: bytes to a request": ("router.serving.listener:Connection.data_received",),
    "task, count and connection table": (
        "router.serving.listener:Connection._answer",
        "router.serving.listener:Listener.serve",
    ),
    "rules for hosts and pages": ("router.web_origins:WebOrigins.admit",),
    "API: path, ids, context": ("edge_node.http.api:Api.handle", "edge_node.http.api:Api.begin"),
    "caller and routing hints": ("edge_node.http.api:RequestReader.request",),
    "body: hash, decode, check": (
        "edge_node.http.api:RequestReader._parse",
        "edge_node.http.api:RequestReader.sampled_chat",
    ),
    "admission: rate and permit": (
        "edge_node.serving.requests:Admission.admit",
        "edge_node.serving.requests:Admission.try_acquire",
        "edge_node.serving.requests:Admission.release",
    ),
    "service: hops, deadline": (
        "edge_node.serving.service:Service.answer",
        "edge_node.serving.direct:DirectAnswers.begin",
    ),
    "snapshot of signals": (
        "edge_node.signals.collector:SignalCollector.recent_snapshot",
        "edge_node.signals.collector:SignalCollector.snapshot",
    ),
    "cache rule and key": (
        "edge_node.serving.service:early_bypass",
        "router.decision.decide:CachePlanner.plan_memoized",
    ),
    "cache look-up": (
        "edge_node.storage.cache:AnswerCache.lookup_memory",
        "edge_node.storage.cache:AnswerCache.lookup_disk",
    ),
    "decide": ("edge_node.serving.service:Service._decide", "edge_node.serving.direct:DirectAnswers._plan"),
    "attempt: states, relay, timer": (
        "edge_node.serving.generation:AttemptRunner.run",
        "edge_node.serving.direct:DirectAnswer.changed",
    ),
    "cloud: breaker, health, fields": (
        "edge_node.backends.cloud.backend:CloudBackend._complete",
        "edge_node.backends.cloud.backend:CloudBackend.generate",
        "edge_node.backends.cloud.backend:CloudBackend.begin",
        "edge_node.backends.cloud.backend:CloudBackend.succeeded",
        "router.serving.upstream.server:OpenAIServer.request",
    ),
    "cloud: encode the request": (
        "edge_node.backends.cloud.backend:encode_request",
        "router.serving.upstream.server:encode_request",
    ),
    "HTTP client: connection, write": (
        "router.serving.http_client:HttpClient.request",
        "router.serving.http_client:HttpClient.begin",
    ),
    "HTTP client: read": ("router.serving.http_client:HttpConnection.data_received",),
    "cloud: decode the answer": (
        "edge_node.backends.cloud.backend:decode_answer",
        "edge_node.serving.direct:decode_answer",
        "router.serving.upstream.server:StreamReader._take",
    ),
    "reply: encode and write": (
        "router.serving.responses:HttpReplyWriter.commit",
        "router.serving.responses:HttpReplyWriter.send",
        "router.serving.responses:HttpReplyWriter.replay",
        "router.serving.responses:HttpReplyWriter.end",
        "router.serving.responses:EventTexts.send",
        "router.serving.listener:answer_plain",
        "edge_node.serving.direct:encode_whole",
        "edge_node.serving.direct:send_plain",
    ),
    "record": (
        "edge_node.serving.requests:RequestContext.finish",
        "edge_node.serving.direct:DirectAnswer._record",
        "edge_node.serving.service:Service._finish_request",
        "edge_node.serving.service:Service._finish_generation",
        "edge_node.storage.decisions:DecisionStore.add",
    ),
    "metrics": (
        "edge_node.observability.metrics:Metrics.request_finished",
        "edge_node.observability.metrics:Metrics.generation_finished",
        "edge_node.observability.metrics:Metrics.passed_on",
    ),
    OFF: ("edge_node.observability.tracing:RequestTracer.begin", "edge_node.observability.tracing:RequestTrace.end"),
}
SCENARIOS = {
    "forwarded request": Scenario("forwarded request", "pass", MANY, 2.0),
    "a stream of 64 tokens": Scenario("a stream of 64 tokens", "stream", MANY, 2.0),
    "cached answer": Scenario("cached answer", "hit", MANY, 2.0),
}


class Cost(NamedTuple):
    """What a stopwatch takes of a call, ns: within the time that it measures, and around it."""

    inside: float = 0.0
    around: float = 0.0


_FREE = Cost()
_INTERRUPTED_NS = 500_000  # a longer call was interrupted: another program ran on the core
_OUTSIDE = ""  # the mechanism around those of the table


class Share(msgspec.Struct):
    """A mechanism's time, and the part of it that its stopwatches should have cost, ns."""

    calls: int = 0
    interrupted: int = 0
    ns: float = 0.0
    cost_ns: float = 0.0

    def scaled(self, requests: int) -> tuple[float, float]:
        """Return both a request, µs; interrupted calls count as the others' mean."""
        scale = self.calls / max(1, self.calls - self.interrupted) / max(1, requests) / 1e3
        return self.ns * scale, self.cost_ns * scale


class Profile(msgspec.Struct):
    requests: int
    shares: dict[str, Share]


class _Call:
    __slots__ = ("called_ns", "cost_ns", "mechanism", "started")

    def __init__(self, mechanism: str, started: int) -> None:
        self.mechanism = mechanism
        self.started = started  # ns
        self.called_ns = 0  # of the functions that it called
        self.cost_ns = 0.0  # of their stopwatches


class Stopwatch:
    """Time by mechanism, in the one thread of an event loop.

    Args:
        call: Its cost in a call of a function.
        step: Its cost in a step of a coroutine.
        first: The number of requests that are not measured.
        clock: Nanoseconds.
    """

    def __init__(
        self, call: Cost = _FREE, step: Cost = _FREE, first: int = 0, clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self.shares: dict[str, Share] = defaultdict(Share)
        self.requests = 0
        self._call = call
        self._step = step
        self._first = first
        self._clock = clock
        self._running: list[_Call] = []

    @property
    def profile(self) -> Profile:
        return Profile(max(0, self.requests - self._first), self.shares)

    def enter(self, mechanism: str) -> None:
        self._running.append(_Call(mechanism, self._clock()))

    def leave(self, cost: Cost) -> None:
        now = self._clock()
        call = self._running.pop()
        took_ns = now - call.started
        if self._running:
            self._running[-1].called_ns += took_ns
            self._running[-1].cost_ns += cost.around
        if self.requests < self._first:
            return
        if not self._running:
            self.shares[_OUTSIDE].calls += 1
            self.shares[_OUTSIDE].cost_ns += cost.around
        share, own_ns = self.shares[call.mechanism], took_ns - call.called_ns
        share.calls += 1
        if own_ns > _INTERRUPTED_NS:
            share.interrupted += 1
        else:
            share.ns += own_ns
            share.cost_ns += call.cost_ns + cost.inside

    def wrap(self, mechanism: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with the stopwatch around each of its steps."""
        if inspect.isasyncgenfunction(function):

            @functools.wraps(function)
            async def generate(*args: Any, **more: Any) -> AsyncIterator[Any]:
                pieces = function(*args, **more)
                try:
                    while True:
                        try:
                            piece = await self._steps(mechanism, anext(pieces))
                        except StopAsyncIteration:
                            return
                        yield piece
                finally:
                    await pieces.aclose()

            return generate
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run(*args: Any, **more: Any) -> Any:
                return await self._steps(mechanism, function(*args, **more))

            return run

        @functools.wraps(function)
        def call(*args: Any, **more: Any) -> Any:
            self.enter(mechanism)
            try:
                return function(*args, **more)
            finally:
                self.leave(self._call)

        return call

    @coroutine
    def _steps(self, mechanism: str, waiting: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        steps = waiting.__await__()
        step: Callable[[], Any] = functools.partial(next, steps)
        while True:
            self.enter(mechanism)
            try:
                future = step()
            except StopIteration as end:
                return end.value
            finally:
                self.leave(self._step)
            try:
                value = yield future
                step = functools.partial(steps.send, value)
            except BaseException as failure:  # it is the function's
                step = functools.partial(steps.throw, failure)


def calibrate() -> tuple[Cost, Cost]:
    """Return a stopwatch's cost in a call, and in a step of a coroutine: the least of many short measurements."""
    rounds, repeats = 500, 60

    def bare() -> None: ...

    async def bare_step() -> None: ...

    async def repeat(step: Callable[[], Awaitable[None]]) -> None:
        for _ in range(rounds):
            await step()

    def calls(function: Callable[[], object]) -> float:
        started = time.perf_counter_ns()
        for _ in range(rounds):
            function()
        return (time.perf_counter_ns() - started) / rounds

    def steps(step: Callable[[], Awaitable[None]]) -> float:
        started = time.perf_counter_ns()
        with contextlib.suppress(StopIteration):
            repeat(step).send(None)
        return (time.perf_counter_ns() - started) / rounds

    def cost(measure: Callable[[Callable[..., Any]], float], function: Callable[..., Any]) -> Cost:
        without = min(measure(function) for _ in range(repeats))
        found = []
        for _ in range(repeats):
            watch = Stopwatch()
            took = measure(watch.wrap("inner", function))
            found.append((took, watch.shares["inner"].ns / rounds))
        took, inside = min(found)
        return Cost(inside, max(0.0, took - without - inside))

    return cost(calls, bare), cost(steps, bare_step)


def install(watch: Stopwatch) -> None:
    """Put the stopwatch around each function of the table. Raises AttributeError if one is not there."""
    for mechanism, paths in MECHANISMS.items():
        for path in paths:
            module, _, names = path.partition(":")
            *owners, name = names.split(".")
            owner = functools.reduce(getattr, owners, importlib.import_module(f"causeway_server.{module}"))
            setattr(owner, name, watch.wrap(mechanism, getattr(owner, name)))


def run_daemon(figures: Path, first: int) -> None:
    """Run `causeway-edge` with the stopwatch from its request number `first`, then write its figures."""
    from causeway_server.edge_node.cli.main import main as run

    watch = Stopwatch(*calibrate(), first)
    install(watch)
    from causeway_server.edge_node.storage.decisions import DecisionStore

    add = DecisionStore.add

    def counted(self: DecisionStore, record: Any) -> None:
        watch.requests += 1
        add(self, record)

    DecisionStore.add = counted  # type: ignore[method-assign]  # each request has one record
    try:
        run()
    finally:
        figures.write_bytes(msgspec.json.encode(watch.profile))


class Measured(msgspec.Struct):
    """A scenario: its profile, and the processor time of a request without and with stopwatches, µs."""

    profile: Profile
    total_us: float
    watched_us: float

    @property
    def shares_us(self) -> dict[str, tuple[float, float]]:
        """The time of a request by mechanism, and what its stopwatches should have cost."""
        return {name: share.scaled(self.profile.requests) for name, share in self.profile.shares.items()}

    @property
    def factor(self) -> float:
        """Return by what factor the stopwatches cost more than their own price, because caches are cold."""
        expected_us = sum(cost for _, cost in self.shares_us.values())
        return max(0.0, self.watched_us - self.total_us) / expected_us


def measure(programs: Programs, seconds: float) -> dict[str, Measured]:
    """Measure a daemon without stopwatches and one with them, in each scenario."""
    cores = sorted(os.sched_getaffinity(0))
    found = {}
    with upstream(programs, cores[0]) as (port, pid):
        for name, scenario in SCENARIOS.items():
            plan = Plan(port, "mock", TOKENS, 0, pid, cores[0], (msgspec.structs.replace(scenario, seconds=seconds),))
            first = MANY + (HIT_PROMPTS if scenario.kind == "hit" else 0)  # connections are new, the cache is empty
            with tempfile.TemporaryDirectory() as folder:
                figures = Path(folder) / "figures.json"
                total_us = _run(plan, programs, cores[-1], ())
                program = ("-m", "tests.bench.edge_profile", str(figures), str(first))
                watched_us = _run(plan, programs, cores[-1], program)
                profile = msgspec.json.decode(figures.read_bytes(), type=Profile)
            found[name] = Measured(profile, total_us, watched_us)
    return found


def _run(plan: Plan, programs: Programs, core: int, program: Sequence[str]) -> float:
    """Return the processor time a request of a daemon, µs."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running("ours", Start(Path(folder), free_port(), plan.port, programs), core, program) as server,
    ):
        (figures,) = load_from(msgspec.structs.replace(plan, port=server.port, pid=server.pid)).values()
        return figures.cpu_us


def rows(measured: Mapping[str, Measured]) -> Iterator[tuple[str, ...]]:
    """Return the lines of the table."""
    factor = statistics.median(one.factor for one in measured.values())
    shares = {
        name: {
            mechanism: us - factor * cost for mechanism, (us, cost) in one.shares_us.items() if mechanism != _OUTSIDE
        }
        for name, one in measured.items()
    }
    for mechanism in MECHANISMS:
        yield (mechanism, *(f"{shares[name].get(mechanism, 0.0):.1f}" for name in measured))
    left = [one.total_us - sum(shares[name].values()) for name, one in measured.items()]
    yield ("everything else: event loop, kernel, other functions", *(f"{us:.1f}" for us in left))
    yield ("total", *(f"{one.total_us:.1f}" for one in measured.values()))


def silent(measured: Mapping[str, Measured]) -> list[str]:
    """Return the mechanisms that no request has passed: their work is done by other functions now."""
    passed = {name for one in measured.values() for name, share in one.profile.shares.items() if share.calls}
    return [name for name in MECHANISMS if name not in passed and name != OFF]


def section(lines: Sequence[tuple[str, ...]], source: Sequence[str]) -> str:
    """Return the section of PROFILE.md; `source`: what was run, and where."""
    return "\n".join(
        [
            TITLE,
            "",
            *source,
            f"Figures are µs of processor time per request, with {MANY} requests in flight. Streams have a token every",
            f"{GAP_US / 1000:g} ms. The functions of each mechanism are timed in a running daemon, without the time of",
            "functions of other mechanisms that they call.",
            "",
            f"| mechanism | {' | '.join(SCENARIOS)} |",
            "|---" * (len(SCENARIOS) + 1) + "|",
            *(f"| {' | '.join(line)} |" for line in lines),
            "",
        ]
    )


def main() -> None:
    if len(sys.argv) > 3 and sys.argv[3] == "serve":
        run_daemon(Path(sys.argv.pop(1)), int(sys.argv.pop(1)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each scenario")
    parser.add_argument("--write", action="store_true", help=f"keep the table in {PROFILE.name}")
    options = parser.parse_args()
    load, started = psutil.getloadavg()[0], time.monotonic()
    measured = measure(set_up(("ours",), agreed=True), options.seconds)
    if missing := silent(measured):
        sys.exit(f"No request passes {', '.join(missing)}. Look for the functions that do its work now in MECHANISMS.")
    lines = list(rows(measured))
    print(table(("mechanism", *SCENARIOS), lines))
    command = " ".join(("python -m tests.bench profile", *(word for word in sys.argv[1:] if word != "--write")))
    source = origin(command, time.monotonic() - started, load)
    print(*source, sep="\n")
    if options.write:
        PROFILE.write_text(with_section(PROFILE.read_text(), TITLE, section(lines, source)))


if __name__ == "__main__":
    sys.exit(run_tool(main))
