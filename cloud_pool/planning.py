"""Capacity planning: the replicas that a load needs, their cost, and a request's waiting time (`causeway-cloud plan`).

1. work     the replica's time for one request: w = overhead + prompt / prefill rate + completion / decode rate [s].
            Rates are those of the replica, all its sequences together, with its slots full of requests that do
            both: prefill and decode slow each other down, so the rates of each alone are too high (`measure`).
2. needed   replicas so that λ·w / replicas ≤ the target utilisation (λ: requests a second at the peak)
3. replicas `needed` plus `spare_replicas`; with zones, enough that `needed` remain when any one zone is lost
4. waiting  the slots are servers of an M/G/c queue: c = replicas · slots, service time S = slots · w (Little's law).
            P(wait) is Erlang's C formula (Erlang 1917; by the recursion of Erlang B, stable for any c), the mean wait
            that of M/M/c times (1 + cv²)/2 (Allen and Cunneen's approximation; see G. Bolch et al., Queueing Networks
            and Markov Chains, 6.3), its tail exponential.

`plan` is pure. `measure` finds the rates of one replica through an OpenAI endpoint. Every prompt begins differently, so
that no shared prefix makes prefill look faster than it is, and `ignore_eos` (vLLM's name, which our engine accepts too)
keeps every answer at its full length.
"""

from __future__ import annotations

import math
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import aiohttp
import anyio
import msgspec
from msgspec import Meta

from causeway_server.router.config import Positive
from causeway_server.router.errors import ConfigError

Rate = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
Amount = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Count = Annotated[int, Meta(ge=0)]
HOURS_A_MONTH = 730.0
_WORDS = "time light music door alarm kitchen volume timer lamp weather window heating".split()
_LONG_WORDS, _LONG_ANSWER_TOKENS = 160, 64
_ROUNDS = 3
_MIN_TOKEN_S = 1e-9  # no machine is faster
_TIMEOUT = aiohttp.ClientTimeout(total=300)


class Lengths(msgspec.Struct, frozen=True):
    """Length distribution of prompts or answers, in tokens. `cv`: standard deviation over the mean (0: all equal)."""

    mean: Rate
    cv: Amount = 1.0


class ThroughputPoint(msgspec.Struct, frozen=True):
    """Answer tokens per second of one replica, all its sequences together, at this number of concurrent sequences."""

    sequences: Positive
    tokens_per_s: Rate


class ExpectedLoad(msgspec.Struct, frozen=True, kw_only=True):
    peak_rps: Rate
    prompt: Lengths
    completion: Lengths


class ReplicaMeasurement(msgspec.Struct, frozen=True):
    """Speed of one replica. `prefill_tokens_per_s` and `overhead_s` are those of the fastest point."""

    prefill_tokens_per_s: Rate
    decode: Annotated[tuple[ThroughputPoint, ...], Meta(min_length=1)]
    overhead_s: Amount = 0.0  # fixed time of each request, independent of its lengths


class ReplicaProfile(ReplicaMeasurement, frozen=True, kw_only=True):
    """A measured replica with its price. `slots`: concurrent sequences; 0: those of the fastest point."""

    slots: Count = 0
    usd_per_hour: Amount = 0.0


class PlanTargets(msgspec.Struct, frozen=True, kw_only=True):
    utilisation: Annotated[float, Meta(gt=0, lt=1)] = 0.7  # 0 to 1; at 1 the queue grows without bound
    spare_replicas: Count = 1  # number of replicas that may be lost at the peak
    zones: Positive = 1  # number of zones; above 1, any one zone may be lost


class CapacityPlan(msgspec.Struct, frozen=True, kw_only=True):
    replicas: int
    needed: int  # number of replicas without redundancy
    per_zone: int
    slots: int  # concurrent sequences of a replica
    request_s: float  # time of a replica for one request
    replica_rps: float  # requests per second of a replica at saturation
    utilisation: float  # utilisation at the peak
    utilisation_after_loss: float  # utilisation at the peak, with the spare replicas or a zone lost
    wait_probability: float
    wait_mean_s: float
    wait_p99_s: float
    usd_per_hour: float
    usd_per_month: float
    usd_per_million_tokens: float  # cost of prompt and answer tokens together, if the peak lasted all day


def plan(load: ExpectedLoad, replica: ReplicaProfile, targets: PlanTargets) -> CapacityPlan:
    """Compute the plan. Raises ConfigError for numbers out of range."""
    _check(load, replica, targets)
    slots = replica.slots or max(replica.decode, key=lambda point: point.tokens_per_s).sequences
    decode_rate = decode_tokens_per_s(replica.decode, slots)
    request_s = replica.overhead_s + load.prompt.mean / replica.prefill_tokens_per_s  # (1)
    request_s += load.completion.mean / decode_rate
    busy = load.peak_rps * request_s
    # Against rounding: 0.7 of ten replicas is seven, not eight.
    needed = max(1, math.ceil(busy / targets.utilisation - 1e-9))  # (2)
    per_zone, replicas = _spread(needed, targets)  # (3)
    remaining = replicas - (per_zone if targets.zones > 1 else targets.spare_replicas)
    variance = (load.prompt.mean * load.prompt.cv / replica.prefill_tokens_per_s) ** 2
    variance += (load.completion.mean * load.completion.cv / decode_rate) ** 2
    probability, mean_s, p99_s = _waiting(replicas * slots, load.peak_rps, slots * request_s, variance / request_s**2)
    usd_per_hour = replicas * replica.usd_per_hour
    tokens_per_hour = 3600 * load.peak_rps * (load.prompt.mean + load.completion.mean)
    return CapacityPlan(
        replicas=replicas,
        needed=needed,
        per_zone=per_zone,
        slots=slots,
        request_s=request_s,
        replica_rps=1.0 / request_s,
        utilisation=busy / replicas,
        utilisation_after_loss=busy / remaining,
        wait_probability=probability,
        wait_mean_s=mean_s,
        wait_p99_s=p99_s,
        usd_per_hour=usd_per_hour,
        usd_per_month=usd_per_hour * HOURS_A_MONTH,
        usd_per_million_tokens=1_000_000 * usd_per_hour / tokens_per_hour,
    )


def lengths_of(samples: Sequence[float]) -> Lengths:
    """Return mean and spread of measured lengths, in tokens. Raises ConfigError if there are none."""
    if not samples or not statistics.fmean(samples) > 0:
        raise ConfigError("No lengths were given, or all are zero.")
    mean = statistics.fmean(samples)
    return Lengths(mean, statistics.pstdev(samples) / mean)


def decode_tokens_per_s(points: Sequence[ThroughputPoint], sequences: int) -> float:
    """Interpolate between the two nearest measured points; outside their range, return the nearest point."""
    ordered = sorted(points, key=lambda point: point.sequences)
    below = [point for point in ordered if point.sequences <= sequences]
    above = [point for point in ordered if point.sequences >= sequences]
    if not below or not above:
        return (below or above)[-1 if below else 0].tokens_per_s
    first, last = below[-1], above[0]
    if first.sequences == last.sequences:
        return first.tokens_per_s
    part = (sequences - first.sequences) / (last.sequences - first.sequences)
    return first.tokens_per_s + part * (last.tokens_per_s - first.tokens_per_s)


def erlang_c(servers: int, offered: float) -> float:
    """Return the probability that a request waits (Erlang's C); 1 if `offered` (rate · service time) ≥ `servers`."""
    if offered >= servers:
        return 1.0
    blocked = 1.0  # Erlang B with no server
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    return blocked / (1.0 - offered / servers * (1.0 - blocked))


def _waiting(servers: int, rate: float, service_s: float, cv2: float) -> tuple[float, float, float]:
    """Return the wait's probability, mean and 99th percentile (4); infinite where the queue grows without bound."""
    offered = rate * service_s
    if offered >= servers:
        return 1.0, math.inf, math.inf
    probability = erlang_c(servers, offered)
    scale_s = service_s / (servers - offered) * (1.0 + cv2) / 2.0
    p99_s = scale_s * math.log(probability / 0.01) if probability > 0.01 else 0.0
    return probability, probability * scale_s, p99_s


def _spread(needed: int, targets: PlanTargets) -> tuple[int, int]:
    """Return the number of replicas per zone and in total."""
    if targets.zones == 1:
        return needed + targets.spare_replicas, needed + targets.spare_replicas
    after_loss = math.ceil(needed / (targets.zones - 1))
    per_zone = max(after_loss, math.ceil((needed + targets.spare_replicas) / targets.zones))
    return per_zone, per_zone * targets.zones


def _check(*parts: ExpectedLoad | ReplicaProfile | PlanTargets) -> None:
    """Check the plan's numbers. Raises ConfigError if one is out of range."""
    try:
        for part in parts:
            msgspec.convert(msgspec.to_builtins(part), type(part))
    except msgspec.ValidationError as error:
        raise ConfigError(f"The numbers of the plan are out of range: {error}") from error


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int


class _Answer(msgspec.Struct, frozen=True):
    usage: _Usage


class LoadRun(msgspec.Struct, frozen=True):
    """The result of a closed loop, in which each caller sends its next request as soon as it gets its answer."""

    requests: int
    seconds: float
    prompt_tokens: int
    completion_tokens: int


class MeasuredEndpoint:
    """An OpenAI endpoint to measure; `url` ends in /v1."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._session = session
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._model = model
        self._clock = clock

    async def run(self, sequences: int, requests: int, *, words: int, answer_tokens: int) -> LoadRun:
        """Run `requests` requests with `sequences` callers. Raises ConfigError: the endpoint does not answer."""
        left = requests
        usages: list[_Usage] = []
        errors: list[ConfigError] = []

        async def caller() -> None:
            nonlocal left
            try:
                while left > 0:
                    left -= 1
                    usages.append(await self._send(words, answer_tokens))
            except ConfigError as error:
                errors.append(error)  # Raised below: a task group would wrap it.
                callers.cancel_scope.cancel()

        began = self._clock()
        async with anyio.create_task_group() as callers:
            for _ in range(sequences):
                callers.start_soon(caller)
        for error in errors:
            raise error
        seconds = self._clock() - began
        return LoadRun(
            len(usages),
            seconds,
            sum(usage.prompt_tokens for usage in usages),
            sum(usage.completion_tokens for usage in usages),
        )

    async def _send(self, words: int, answer_tokens: int) -> _Usage:
        """Send one request and return its usage. Raises ConfigError if the endpoint fails."""
        text = " ".join([secrets.token_hex(4), *(_WORDS[secrets.randbelow(len(_WORDS))] for _ in range(words))])
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": answer_tokens,
            "ignore_eos": True,
        }
        try:
            async with self._session.post(self._url, json=body, timeout=_TIMEOUT) as reply:
                data = await reply.read()
                if reply.status != 200:
                    raise ConfigError(
                        f"The endpoint answered HTTP {reply.status}: {data[:200].decode(errors='replace')}",
                        where=self._url,
                    )
                return msgspec.json.decode(data, type=_Answer).usage
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            raise ConfigError(str(error) or type(error).__name__, where=self._url) from error


async def measure(endpoint: MeasuredEndpoint, sequences: Sequence[int]) -> ReplicaMeasurement:
    """Measure the rates of a replica whose slots are full, for each number of sequences.

    Three mixes are run in turn, three times, so that other work on the machine affects all of them: (a) short prompts
    and short answers, (b) long prompts, (c) long answers. The medians of their times per request give three equations
    for the three unknowns:

        time = overhead + prompt tokens / prefill rate + answer tokens / decode rate

    Raises:
        ConfigError: The endpoint does not answer, or the times do not grow with the lengths.
    """
    await endpoint.run(1, 1, words=1, answer_tokens=1)  # The first request ever pays for loading.
    short, brief = _LONG_WORDS // 4, _LONG_ANSWER_TOKENS // 4
    fits = []
    for count in sequences:
        mixes = ((short, brief), (_LONG_WORDS, brief), (short, _LONG_ANSWER_TOKENS))
        runs: list[list[LoadRun]] = [[] for _ in mixes]
        for _ in range(_ROUNDS):
            for mix_runs, (long, answer) in zip(runs, mixes, strict=True):
                mix_runs.append(await endpoint.run(count, 3 * count, words=long, answer_tokens=answer))
        fits.append(_fitted(count, *(_cost(each) for each in runs)))
    fastest = max(fits, key=lambda fit: fit.decode[0].tokens_per_s)
    return msgspec.structs.replace(fastest, decode=tuple(fit.decode[0] for fit in fits))


class _Cost(msgspec.Struct, frozen=True):
    """Time and tokens of one request of a mix."""

    seconds: float
    prompt: float
    completion: float


def _cost(runs: Sequence[LoadRun]) -> _Cost:
    requests = sum(run.requests for run in runs)
    return _Cost(
        statistics.median(run.seconds / run.requests for run in runs),
        sum(run.prompt_tokens for run in runs) / requests,
        sum(run.completion_tokens for run in runs) / requests,
    )


def _fitted(sequences: int, base: _Cost, long_prompt: _Cost, long_answer: _Cost) -> ReplicaMeasurement:
    """Solve the three equations. Raises ConfigError if the times do not grow with the lengths."""
    prompt_s = (long_prompt.seconds - base.seconds) / max(long_prompt.prompt - base.prompt, 1.0)
    answer_s = (long_answer.seconds - base.seconds) / max(long_answer.completion - base.completion, 1.0)
    if min(prompt_s, answer_s) < _MIN_TOKEN_S:
        raise ConfigError(
            f"With {sequences} sequences, longer requests did not take more time. Measure again on an idle machine."
        )
    overhead_s = max(0.0, base.seconds - base.prompt * prompt_s - base.completion * answer_s)
    return ReplicaMeasurement(1.0 / prompt_s, (ThroughputPoint(sequences, 1.0 / answer_s),), overhead_s)
