"""`python -m tests.bench day --questions FILE`: a day of two hours on a real device with real models.

The user of this part: a device whose owner promises quality for some requests, has a budget of money for the others,
and a battery that must last. The parts are real: a daemon with a 0.5B model, a gateway and Triton with a 1.5B model,
and questions that neither the pair's calibration nor the estimates of `best_of` saw. Load: open-loop arrivals that
follow a day's shape; some are private, some are repeated. Faults: the network between device and gateway is cut, and
the gateway is killed and started again. Answers are graded against references; for each answer of the device under the
promise, the large model is asked the same afterwards.

What is simulated: the sensors. The daemon sees another `/sys/class`, with the files of a Jetson. Power follows the
processor time of the device's engine; a battery and a heat sink follow the power. The local day begins with the run,
and the daemon knows from "the day before" how many requests its hours have, and what the recorded answers of the
pair (tests/bench/pair) tell about the promise, with confidences of fits that did not see the question. Days are shorter
with `--minutes`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import math
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil

from causeway_server.edge_node.clock import Clock
from causeway_server.edge_node.daemon.optional_parts import Manifests
from causeway_server.edge_node.signals.estimators import LearnedEstimators
from causeway_server.edge_node.storage.shadow import ShadowStore
from causeway_server.edge_node.storage.spend import ENERGY, SpendStore
from causeway_server.models.comparison.prompts import EvaluationPrompt, is_right, read_prompts
from causeway_server.models.signals.promise import PromiseRecord
from causeway_server.router.decision.pacing import Demand, EnergyState
from causeway_server.router.policy.compiled import Policy, parse_policy
from causeway_train.calibrate.fit import predict_unseen
from causeway_train.calibrate.prompts import PairAnswers
from tests.stack import BIN, TOKEN, Stack

from .bench_energy import FILES
from .graded import ANSWERS, read
from .rows import Row

SMALL, LARGE = "qwen-05b", "qwen-15b"
INPUT, OUTPUT = 0.15, 0.60  # USD a million tokens
SLICES = 24
_DEMAND = 2  # the row of a store of spending
LOAD_S, ANSWER_S = 900.0, 900.0  # on a busy machine
PRIVATE, PROMISED, REPEATED = 0.08, 0.6, 0.1
SHARE = 0.55  # of what all answers of the cloud would cost: the budget
CUT, KILLED = (0.40, 0.45), 0.65  # of the day
AFTER = 24  # tokens that the handoff holds back
LONG = 50  # questions with long answers
IDLE_W, BUSY_W, RADIO_W = 4.5, 8.0, 0.5
IDLE_SHARE = 0.45  # of the battery, without work; a new one is taken to hold 60 % of what it says
_POLICY = """
version: 1
name: day
targets:
  small: {{at: edge, model: {small}, timeout: 15m, first_token_timeout: 10m}}
  large: {{at: cloud, model: {large}, timeout: 15m, first_token_timeout: 10m, price: {price}}}
constraints: [{{name: private, keep: on_device, when: '"private" in request.tags'}}]
routes:
  - name: promised
    when: '"promised" in request.tags'
    use: [small, large]
    handoff: {{after_tokens: {after}, below: 0.05, within: 1500ms}}
    promise: {{of: large, keep: 0.95, risk: 0.05}}
  - {{name: scored, use: {{best_of: [small, large], weights: {{quality: 1}}}}}}
cache: [{{when: request.temperature == 0.0, exact: {{ttl: 30m, stale_if_error: 2h}}}}]
shadow: {{share: 0.01, usd_per_day: 1.0}}
budget: {{usd_per_day: {usd:.6f}, battery: {{since: "00:00", until: "{until}", radio_w: {radio_w}}}, heat: {{}}}}
limits: {{concurrent: 16, queue: 64}}
"""
_EDGE = """
policy: {policy}
engine: {{threads: 1, sequences: 2, model_dirs: [{models}]}}
log: info
"""
_GATEWAY = """
server: {{default_deadline_s: {deadline_s}}}
tiers: [{{name: {large}, can: [chat, completion], upstream: {{token_timeout_s: {deadline_s}}}}}]
load_balancing: {{silent_before_probe_s: 10, probe_timeout_s: 60, hung_after_s: 180}}
"""
_OVER = 'mount --bind "$0" /sys/class && exec "$@"'


class Ask(msgspec.Struct, frozen=True):
    at_s: float
    prompt: EvaluationPrompt
    promised: bool
    private: bool


class Answered(msgspec.Struct):
    """What became of a request. `right`: of its answer; `cloud_right`: of the large model's, if it was asked later."""

    ask: Ask
    status: int = 0
    route: str = ""
    rule: str = ""
    reason: str = ""
    took_s: float = 0.0
    usd: float = 0.0
    price: float | None = None  # of a dollar, when it was decided
    covered: bool = False  # by the promise
    right: bool = False
    cloud_right: bool | None = None


class Sensors:
    """The files that the daemon reads, and what they follow: a battery, and a die of one time constant."""

    def __init__(self, root: Path, minutes: float) -> None:
        self.root = root
        self.holds_wh = IDLE_W * minutes / 60 / IDLE_SHARE
        self.left_wh, self.die_c, self.hottest_c = self.holds_wh, 40.0, 40.0
        files = {**FILES, "sys/class/power_supply/BAT0/energy_full": f"{self.holds_wh * 1e6:.0f}"}
        for name, text in files.items():
            path = root / name.removeprefix("sys/class/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        self.write(IDLE_W)

    def step(self, busy: float, dt: float) -> None:
        """Go on for `dt` seconds. `busy`: cores of the engine's work."""
        power_w = IDLE_W + BUSY_W * busy
        self.left_wh -= power_w * dt / 3600
        self.die_c += (25 + 4.5 * power_w - self.die_c) * -math.expm1(-dt / 180)
        self.hottest_c = max(self.hottest_c, self.die_c)
        self.write(power_w)

    def write(self, power_w: float) -> None:
        charge = max(0.0, 100 * self.left_wh / self.holds_wh)
        for name, value in (
            ("power_supply/BAT0/capacity", charge),
            ("thermal/thermal_zone0/temp", self.die_c * 1000),
            ("hwmon/hwmon1/curr1_input", power_w / 5 * 1000),
        ):
            (self.root / name).write_text(f"{value:.0f}\n")


class Network:
    """Passes bytes on to the gateway, unless it is cut."""

    def __init__(self, port: int) -> None:
        self.port, self.cut = port, False
        self._open: set[asyncio.StreamWriter] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> Any:
        server = await asyncio.start_server(self._pass, "127.0.0.1")
        async with server:
            yield server.sockets[0].getsockname()[1]
            self.drop()

    def drop(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            if self.cut:
                return
            there, back = await asyncio.open_connection("127.0.0.1", self.port)
            self._open.add(back)
            await asyncio.gather(_copy(reader, back), _copy(there, writer), return_exceptions=True)
            self._open.discard(back)
        except OSError:
            pass  # no gateway listens
        finally:
            writer.transport.abort()
            self._open.discard(writer)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


def recorded(prompts: Sequence[EvaluationPrompt]) -> tuple[list[dict[str, Any]], dict[str, PairAnswers]]:
    """Return the graded rows for `causeway-models candidates`, and the answers that the pair's calibration saw."""
    rows = (
        msgspec.json.decode(line, type=PairAnswers) for line in gzip.decompress(ANSWERS.read_bytes()).split(b"\n")[1:-1]
    )
    answers, graded = {row.id: row for row in rows}, []
    for prompt in prompts:
        if (row := answers.get(prompt.id)) is not None:
            sides = {SMALL: row.small, LARGE: row.large}
            grades = {name: float(is_right(prompt, one.text, one.alternatives)) for name, one in sides.items()}
            tokens = {name: one.tokens for name, one in sides.items()}
            graded.append({"prompt": prompt.question, "grades": grades, "tokens": tokens})
    return graded, answers


def asks(prompts: Sequence[EvaluationPrompt], count: int, seconds: float, chance: random.Random) -> list[Ask]:
    """Return the requests of the day in their order."""
    shape = [1 + 4 * math.exp(-(((hour - 12) / 4) ** 2)) for hour in range(SLICES)]
    times = sorted((hour + chance.random()) / SLICES for hour in chance.choices(range(SLICES), weights=shape, k=count))
    chance.shuffle(fresh := list(prompts))
    found: list[Ask] = []
    for time_ in times:
        repeats = bool(found) and (chance.random() < REPEATED or not fresh)
        prompt = chance.choice(found).prompt if repeats else fresh.pop()
        private = chance.random() < PRIVATE
        found.append(Ask(time_ * seconds, prompt, not private and chance.random() < PROMISED, private))
    return found


class Run:
    """One day. `result`: what became of each request, in the order of their ends."""

    def __init__(self, stack: Stack, sensors: Sensors, network: Network, day: list[Ask], seconds: float) -> None:
        self.stack, self.sensors, self.network, self.day, self.seconds = stack, sensors, network, day, seconds
        self.answered: list[Answered] = []
        self.charges: list[float] = []  # at the end of each slice
        self.failed_at = ""

    async def go(self) -> None:
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
            began = time.monotonic()
            watching = [group.create_task(self._sense(began)), group.create_task(self._break(began))]
            async with asyncio.TaskGroup() as sending:
                for ask in self.day:
                    await asyncio.sleep(max(0.0, began + ask.at_s - time.monotonic()))
                    sending.create_task(self._send(session, ask))
                await asyncio.sleep(max(0.0, began + self.seconds - time.monotonic()))
            for task in watching:
                task.cancel()
            self.charges.append(self.charge)
            for one in self.answered:  # what the large model says to what the device answered under the promise
                if one.covered and one.route == "edge":
                    one.cloud_right, _ = await self._graded(session, self.stack.gateway_url, LARGE, one.ask.prompt)

    async def _send(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        one, began = Answered(ask), time.monotonic()
        self.answered.append(one)
        tags = ",".join(name for name, has in (("private", ask.private), ("promised", ask.promised)) if has)
        try:
            one.right, reply = await self._graded(session, self.stack.edge_url, "auto", ask.prompt, tags)
        except aiohttp.ClientError as error:
            one.reason = type(error).__name__
            return
        finally:
            one.took_s = time.monotonic() - began
        one.status, headers = reply.status, reply.headers
        one.route, one.reason = headers.get("x-causeway-route", ""), headers.get("x-causeway-reason", "")
        async with session.get(f"{self.stack.edge_url}/v1/decisions/{headers['x-causeway-decision']}") as found:
            record = await found.json()
        decision = record.get("decision") or {}
        one.covered = decision.get("promise") is not None and not one.reason.startswith("fallback")
        one.rule, one.price = decision.get("rule", ""), record["snapshot"]["spend"].get("price")
        one.usd = record["outcome"].get("usd") or 0.0
        with (self.stack.folder / "answered.jsonl").open("ab") as log:
            log.write(msgspec.json.encode(one) + b"\n")

    async def _graded(
        self, session: aiohttp.ClientSession, url: str, model: str, prompt: EvaluationPrompt, tags: str = ""
    ) -> tuple[bool, aiohttp.ClientResponse]:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt.question}],
            "max_tokens": prompt.answer_tokens,
            "temperature": 0,
        }
        headers = {"authorization": f"Bearer {TOKEN}"} | ({"x-causeway-tags": tags} if tags else {})
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
            answer = json.loads(await reply.read())
        return reply.status == 200 and is_right(prompt, answer["choices"][0]["message"]["content"] or ""), reply

    async def _sense(self, began: float) -> None:
        """Let the sensors follow the engine's work."""
        engine = psutil.Process(self.stack.parts["edge"].popen.pid)
        last_cpu, last = _cpu_s(engine), time.monotonic()
        while True:
            await asyncio.sleep(1.0)
            cpu, now = _cpu_s(engine), time.monotonic()
            self.sensors.step(max(0.0, cpu - last_cpu) / (now - last), now - last)
            last_cpu, last = cpu, now
            if len(self.charges) < int((now - began) / self.seconds * SLICES):
                self.charges.append(self.charge)

    @property
    def charge(self) -> float:
        """The battery's charge, %."""
        return 100 * self.sensors.left_wh / self.sensors.holds_wh

    async def _break(self, began: float) -> None:
        for share, act in ((CUT[0], self._cut), (CUT[1], self._mend), (KILLED, self._kill)):
            await asyncio.sleep(max(0.0, began + share * self.seconds - time.monotonic()))
            await asyncio.to_thread(act) if act == self._kill else act()

    def _cut(self) -> None:
        self.network.cut = True
        self.network.drop()

    def _mend(self) -> None:
        self.network.cut = False

    def _kill(self) -> None:
        gateway = self.stack.parts["gateway"]
        gateway.kill()
        gateway.start()
        gateway.ready(LOAD_S)


def _cpu_s(process: psutil.Process) -> float:
    """Return the processor time of the daemon's children: its engine."""
    total = 0.0
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(child.cpu_times()[:2])
    return total


def evidence(policy: Policy, questions: Path) -> PromiseRecord:
    """Return what the promise knows after the recorded requests, all of which the cloud answered.

    The confidences are those of fits that did not see the question.
    """
    chance, learned = random.Random(0), LearnedEstimators()
    learned.activate(policy)
    learned.promises.use(policy, Manifests(()).weights, learned.pairs)
    _, rows, agreed, _ = read(questions)
    scores = predict_unseen(rows, (AFTER,), 1).stages[-1].tolist()
    for row, score, good in zip(rows.answers, scores, agreed.tolist(), strict=True):
        stated = msgspec.structs.replace(row.confidences[:AFTER][-1], score=score)
        draw = learned.promises.draw("promised", stated, chance, on_device=False)
        if draw is not None:
            learned.promises.label("promised", stated, draw, good=good)
    return learned.promises.records[-1]


async def remembered(folder: Path, day: Sequence[Ask], known: PromiseRecord) -> None:
    """Let the daemon know what it would from the day before: the number of requests, and the promise's evidence."""
    shadows = ShadowStore(folder, Clock())
    await shadows.load()
    shadows.keep_promises([known])
    await asyncio.to_thread(shadows.close)
    hours = [0.0] * 24
    for ask in day:
        hours[int(ask.at_s // 3600)] += 1.0
    store = SpendStore(folder, Clock())
    await store.load()
    scored = [count * (1 - PROMISED) for count in hours]
    store.remember(_DEMAND, Demand(hours=tuple(scored), days=1.0))
    store.remember(ENERGY, EnergyState(demand=Demand(hours=tuple(scored), days=1.0)))
    await asyncio.to_thread(store.close)


def table(run: Run, budget: float) -> Iterator[str]:
    """Yield a line for each twelfth of the day."""
    yield "part  asked  device  cloud  cache  failed  right  USD of the budget  price of a USD  battery"
    slices: list[list[Answered]] = [[] for _ in range(SLICES)]
    for one in run.answered:
        slices[min(SLICES - 1, int(one.ask.at_s / run.seconds * SLICES))].append(one)
    spent = 0.0
    for at in range(0, SLICES, 2):
        found = [*slices[at], *slices[at + 1]]
        routes = Counter(one.route if one.status == 200 else "failed" for one in found)
        right = sum(one.right for one in found) / max(1, len(found))
        spent += sum(one.usd for one in found)
        prices = [one.price for one in found if one.price is not None]
        price = sum(prices) / len(prices) if prices else 0.0
        charge = run.charges[min(at + 1, len(run.charges) - 1)]
        yield (
            f"{at // 2 + 1:4}  {len(found):5}  {routes['edge']:6}  {routes['cloud']:5}  {routes['cache']:5}"
            f"  {routes['failed']:6}  {right:5.0%}  {spent / budget:17.1%}  {price:14.0f}  {charge:6.1f}%"
        )


def rows_of(run: Run, budget: float) -> list[Row]:
    done = [one for one in run.answered if one.status == 200]
    at_all = [one for one in done if one.rule == "promised"]
    promised = [one for one in at_all if one.covered]
    kept_here = [one for one in promised if one.route == "edge"]
    worse = sum(bool(one.cloud_right) and not one.right for one in kept_here)
    private = [one for one in done if one.ask.private]
    scored = [one for one in done if one.rule == "scored"]
    failed = Counter(one.reason or str(one.status) for one in run.answered if one.status != 200)
    spent = sum(one.usd for one in done)
    share = 100.0 / max(1, len(promised))
    routes = Counter(one.route for one in done)
    return [
        Row(
            "requests without an answer",
            len(run.answered) - len(done),
            "",
            note=f"of {len(run.answered)}; {dict(failed)}",
        ),
        Row("answers of the device", 100 * routes["edge"] / max(1, len(done)), "%", note=str(dict(routes))),
        Row(
            "private requests answered elsewhere",
            sum(one.route == "cloud" for one in private),
            "",
            note=f"of {len(private)}",
        ),
        Row(
            "promise: answers as good as the large model's",
            100 - share * worse,
            "%",
            note=f"promised 95 %; {len(promised)} answers",
        ),
        Row("promise: answers of the device", share * len(kept_here), "%"),
        Row("promise: answers without it: fallbacks, or no money was left", len(at_all) - len(promised), ""),
        Row(
            "scored: answers of the device", 100 * sum(one.route == "edge" for one in scored) / max(1, len(scored)), "%"
        ),
        Row("answers that are right", 100 * sum(one.right for one in done) / max(1, len(done)), "%"),
        Row("spent of the budget", 100 * spent / budget, "%", note=f"{spent:.6f} of {budget:.6f} USD"),
        Row("budgets overrun", float(spent > budget), "days"),
        Row("battery at the end", run.charge, "%"),
        Row("highest temperature", run.sensors.hottest_c, "C", note="throttled at 85"),
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--questions", type=Path, required=True, help="the questions with their reference answers")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--rate", type=float, default=0.1, help="requests a second, on average")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for logs, records and the daemon's state")


def main(options: argparse.Namespace) -> list[Row]:
    seconds, chance = options.minutes * 60, random.Random(options.seed)
    prompts = read_prompts([options.questions])
    graded, seen = recorded(prompts)
    unseen = [prompt for prompt in prompts if prompt.id not in seen]
    long = [prompt for prompt in unseen if prompt.metric == "number"]
    count = int(seconds * options.rate)
    fresh = [prompt for prompt in unseen if prompt.metric != "number"] + chance.sample(long, LONG)
    day = asks(fresh, count, seconds, chance)
    each = sum(len(row["prompt"]) / 4 * INPUT + row["tokens"][LARGE] * OUTPUT for row in graded) / len(graded) / 1e6
    budget = SHARE * count * each
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) if options.keep is None else options.keep
        folder.mkdir(exist_ok=True)
        (folder / "graded.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, graded)))
        if not (folder / "models").exists():  # else of an earlier run
            fit = ["candidates", "--graded", folder / "graded.jsonl", "--to", folder / "models"]
            subprocess.run([BIN / "causeway-models", *fit], check=True, stdout=subprocess.DEVNULL)
        minutes = int(options.minutes)
        (folder / "policy.yaml").write_text(
            _POLICY.format(
                small=SMALL,
                after=AFTER,
                large=LARGE,
                price=f"{{input: {INPUT}, output: {OUTPUT}}}",
                usd=budget,
                until=f"{minutes // 60:02}:{minutes % 60:02}",
                radio_w=RADIO_W,
            )
        )
        policy = parse_policy((folder / "policy.yaml").read_text(), "policy.yaml")
        run = asyncio.run(live(folder, day, options.minutes, evidence(policy, options.questions)))
    print("\n".join(table(run, budget)))
    return rows_of(run, budget)


async def live(folder: Path, day: list[Ask], minutes: float, known: PromiseRecord) -> Run:
    """Start the parts, and live the day."""
    stack, sensors = Stack(folder / "stack"), Sensors(folder / "class", minutes)
    network = Network(stack.gateway_port)
    try:
        stack.start_triton(model=LARGE).ready(LOAD_S)
        stack.start_gateway(config=_GATEWAY.format(large=LARGE, deadline_s=ANSWER_S)).ready(LOAD_S)
        async with network.running() as port:
            await remembered(folder / "stack" / "state", day, known)
            now = time.gmtime()
            config = _EDGE.format(policy=folder / "policy.yaml", models=folder / "models")
            prefix = ("unshare", "--map-root-user", "--mount", "sh", "-c", _OVER, str(sensors.root))
            zone = {"TZ": f"DAY+{now.tm_hour}:{now.tm_min:02}:{now.tm_sec:02}"}
            edge = stack.start_edge(
                config, cloud_port=port, env=zone, prefix=prefix, server=f"default_deadline_s: {ANSWER_S}"
            )
            await asyncio.to_thread(edge.ready, LOAD_S)
            await asyncio.to_thread(stack.wait_until_loaded, LOAD_S)
            run = Run(stack, sensors, network, day, minutes * 60)
            await run.go()
        await asyncio.to_thread(stack.close)
        return run
    finally:
        for part in stack.parts.values():
            if part.popen.poll() is None:
                part.kill()
