"""How many requests may be in a tier's Triton at once: found from their times to first token, and followed. Pure.

A server of S sequences answers up to S requests without any of them waiting; one more waits inside it, where we can
neither reorder nor shed it. What shows that is the time to first token (TTFT), not the whole latency, which is mostly
the length of the answer. So the requests that wait inside are counted by Little's law (Little 1961):

    excess = first tokens a second · (TTFT − TTFT of a server that is not full)

and kept near zero, as TCP Vegas keeps its packets in the routers' queues (Brakmo, O'Malley and Peterson 1994). AIMD
against an objective would fill Triton's queue up to the objective, whoever waits in it; Netflix's Gradient2
(concurrency-limits) lets its long-term average drift up with the very queue that it is to find. A delay that lowering
the limit does not cure was not ours: longer prompts, a slower server. So each cut is a trial, as BBR's ProbeRTT
(Cardwell et al. 2016), and the TTFT of a server that is full, and not more, is measured where it matters.

    window    TTFTs of requests handed over since the last change, until their median is good to a fraction of a request
    1. trial  the cut relieved: it was our queue. It did not, and after a large one nor did a second: this TTFT is the
              base from now on, and the limit is back
    2. cut    excess, clearly while it was full or in two windows in a row, while more than half was taken: the limit
              falls by it, at most by half; where it was too high is remembered as the ceiling
    3. doubt  full for DOUBT_S without a cut: a cut by an eighth, to see whether the base is one
    4. grow   full and no excess: by 1, 2, 4 … a window; over the ceiling only every PROBE_S
    5. hold   else: an idle or half empty tier teaches nothing about its limit

The objective, where there is one, bounds the base from above: a gateway that starts before a crowded server finds out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

DOUBT_S = 30.0
PROBE_S = 10.0
UNTRIED_S = 30.0
_HELD_S = 15.0
_SHORTEST_S = 0.2  # a window; shorter ones see bursts
_LONGEST_S = 5.0  # then a few samples do
_FEW, _MANY = 3, 8
_PRECISE = 0.7  # of a request
_TOLERATED = 1.15  # of the base: what no caller notices is left alone
_UNNOTICED = 1.1
_SURE = 2.0  # times the noise, which is two standard errors itself
_FULL = 0.03  # of the places free
_FAILED = 0.9
_LARGE = 4  # a cut
_SPARED = 8  # a limit of which one may be free


class Window(msgspec.Struct):
    """Requests that were handed over under one limit."""

    opened: float = 0.0  # s, the first sample
    ttfts: list[float] = msgspec.field(default_factory=list)  # s, in the order of the first tokens
    peak: int = 0  # in Triton at once
    running: int = 0  # summed over the samples


class WindowSummary(msgspec.Struct, frozen=True):
    """What a window shows."""

    ttft_s: float  # median
    least_s: float
    noise_s: float  # how far off that may be
    late_s: float  # what the next ones will see: a queue that builds up is longer at the window's end
    rate: float  # first tokens a second
    peak: int
    running: float  # on average

    @property
    def grows(self) -> bool:
        """The queue inside, while it was looked at."""
        return self.late_s > self.ttft_s + 2 * self.noise_s


class LimitTrial(msgspec.Struct, frozen=True):
    """A cut whose effect is awaited."""

    limit: int  # before it
    ttft_s: float  # before it
    expected_s: float  # how much of that should go, if it was our queue
    doubted: bool  # nothing was wrong: the base stays what it is
    final: bool  # a small one, or the one before was in vain too

    def is_vain(self, ttft_s: float) -> bool:
        """Less than half came of it; had it become much worse, that would have been something else."""
        return -self.expected_s <= self.ttft_s - ttft_s < self.expected_s / 2


class ConcurrencyLimit:
    """Owns the limit, between `least` and `most`; it begins in the middle. Times are monotonic seconds."""

    def __init__(self, least: int, most: int, objective_s: float = 0.0, now: float = 0.0) -> None:
        self._least, self._most = min(least, most), most
        self._objective_s = objective_s or math.inf
        self.value = max(self._least, -(-most // 2))
        self.base_s: float | None = None  # TTFT where nobody waits inside
        self._changed_at = now
        self._settled_at = now  # neither cut nor half empty since
        self._step = 1
        self._ceiling = 0  # too high, when last tried; 0: not known
        self._ceiling_at = now
        self._held_at = -math.inf  # full, and neither too much nor clearly too little
        self._trial: LimitTrial | None = None
        self._accepted_until = now  # a base over the objective
        self._suspected = False  # excess in the last window, not yet beyond doubt
        self._window = Window()

    def bound(self, most: int, now: float) -> None:
        """No more than that from now on, `least` for one that is smaller. A limit that was as high as it might goes
        with it."""
        if self._least == self._most:
            return
        most, before = max(self._least + 1, most), self._most
        self._most = most
        self._set(now, most if self.value == before else self.value)

    def first_token(self, now: float, seconds: float, running: int) -> None:
        """`seconds` from handing to Triton; `running` are there now, this one too."""
        if self._least == self._most or now - seconds < self._changed_at:
            return  # It tells about the limit before this one.
        window = self._window
        if not window.ttfts:
            window.opened = now
        window.ttfts.append(seconds)
        window.peak = max(window.peak, running)
        window.running += running
        if self._seen(now):
            self._window = Window()
            self._judge(now, look(window, now))

    def is_untried(self, now: float) -> bool:
        """Whether nobody knows if more would do: it takes all the places to find out."""
        found = self._ceiling and self.value >= self._ceiling - 1 and now - self._ceiling_at < UNTRIED_S
        return self.value < self._most and not found and now - self._held_at >= _HELD_S

    @property
    def spare(self) -> int:
        """Places that may be free while it finds out."""
        return max(int(_FULL * self.value), int(self.value >= _SPARED))

    def failed(self, now: float, handed_at: float) -> None:
        """The tier took no more, or gave no first token in time."""
        if self._least == self._most or handed_at < self._changed_at:
            return
        self._ceil(now, self._window.peak or self.value)
        self._trial = None
        self._set(now, int(self.value * _FAILED))

    def _seen(self, now: float) -> bool:
        """Whether the window shows enough."""
        long_s, count = now - self._window.opened, len(self._window.ttfts)
        if long_s < _SHORTEST_S or count < _FEW:
            return False
        enough = max(_MANY, self.value // 2)
        if long_s >= _LONGEST_S or count >= 8 * enough:
            return True
        # Of each fourth sample: a deviation costs as much as the window is long.
        return count >= enough and count % 4 == 0 and noise(self._window.ttfts) * (count - 1) / long_s <= _PRECISE

    def _judge(self, now: float, look: WindowSummary) -> None:
        trial, self._trial = self._trial, None
        vain = trial if trial is not None and trial.is_vain(look.ttft_s) else None
        if vain is not None and (vain.doubted or vain.final):
            self._undo(now, vain, look.ttft_s)  # (1)
            return
        base_s = self._based(now, look)
        excess = look.rate * ((look.late_s if look.grows else look.ttft_s) - base_s)
        allowed = max(0.5, 0.04 * self.value)
        full = look.running >= self.value - max(0.5, self.spare, _FULL * self.value)
        if not full:
            self._settled_at = now
        seen = (
            not self._is_spare(look)
            and excess > allowed
            and look.ttft_s > max(_TOLERATED * base_s, base_s + look.noise_s)
        )
        # Where places were free it was hardly this limit's queue, if it was one: once is no proof.
        sure = seen and (
            self._suspected or (look.peak >= self.value - self.spare and look.ttft_s > base_s + _SURE * look.noise_s)
        )
        self._suspected = seen and not sure
        if sure:
            self._ceil(now, look.peak)
            at = min(self.value, look.peak)
            self._cut(now, at - min(max(1, round(excess)), at // 2), look, base_s, vain)  # (2)
        elif full and now - self._settled_at >= DOUBT_S:
            self._cut(now, self.value - max(1, self.value // 8), look, None)  # (3)
        elif full and not seen and (excess <= allowed / 2 or look.ttft_s <= _UNNOTICED * base_s):
            self._grow(now)  # (4)
        else:
            self._step = 1  # (5)
            if full:
                self._held_at = now

    def _is_spare(self, look: WindowSummary) -> bool:
        """So little ran that a queue inside was not made by this limit."""
        return look.running <= self.value / 2

    def _based(self, now: float, look: WindowSummary) -> float:
        """The base, moved by what was seen: at once where it is clearly lower, else slowly; up, while full, most."""
        base_s, spare = self.base_s, self._is_spare(look)
        if base_s is None:
            base_s = look.ttft_s if spare else look.least_s  # The server may be full of others' work.
        elif look.ttft_s < base_s - look.noise_s:
            base_s = look.ttft_s + look.noise_s  # No lower than is certain: chance would take it down step by step.
        elif look.ttft_s < base_s + look.noise_s or spare:
            base_s += (look.ttft_s - base_s) / (8 if look.ttft_s < base_s or spare else 32)
        self.base_s = base_s
        return base_s if now < self._accepted_until else min(base_s, self._objective_s)

    def _undo(self, now: float, trial: LimitTrial, ttft_s: float) -> None:
        """Nothing came of the trial: the limit is what it was before."""
        if not trial.doubted:
            self.base_s, self._accepted_until, self._ceiling = ttft_s, now + DOUBT_S, 0
        self._set(now, trial.limit)

    def _cut(
        self, now: float, value: int, look: WindowSummary, base_s: float | None, vain: LimitTrial | None = None
    ) -> None:
        """`base_s` None: in doubt. A large cut in vain is followed by another before it counts: where the queue was
        still building up, that hid its relief."""
        before = self.value
        self._set(now, value)
        self._settled_at, self._step = now, 1
        fewer = min(before, look.peak) - self.value
        if fewer > 0 and look.rate > 0.0:
            expected_s = min(fewer / look.rate, look.late_s - (base_s or 0.0))
            limit = before if vain is None else vain.limit
            final = vain is not None or not (look.grows or fewer > max(_LARGE, before // 4))
            self._trial = LimitTrial(limit, look.late_s, expected_s, base_s is None, final)

    def _grow(self, now: float) -> None:
        grown = self.value + self._step
        if not self._ceiling or grown < self._ceiling:
            self._step = min(2 * self._step, max(1, self.value // 4))
        elif now - self._ceiling_at < PROBE_S:
            grown = max(self.value, self._ceiling - 1)
        else:
            grown, self._step, self._ceiling = self.value + 1, 1, 0
        self._set(now, grown)

    def _ceil(self, now: float, peak: int) -> None:
        self._ceiling, self._ceiling_at = max(1, min(self.value, peak)), now

    def _set(self, now: float, value: int) -> None:
        value = max(self._least, min(self._most, value))
        if value != self.value:
            self.value, self._changed_at = value, now
            self._window = Window()


def look(window: Window, now: float) -> WindowSummary:
    count = len(window.ttfts)
    rate = (count - 1) / (now - window.opened)
    ttft_s = statistics.median(window.ttfts)
    return WindowSummary(
        ttft_s=ttft_s,
        least_s=min(window.ttfts),
        noise_s=noise(window.ttfts),
        late_s=max(ttft_s, statistics.median(window.ttfts[-(count // 3) :])),
        rate=rate,
        peak=window.peak,
        running=window.running / count,
    )


def noise(ttfts: Sequence[float]) -> float:
    """Two standard errors of the median (1.25 times the mean's, as of normal samples), s."""
    count, mean = len(ttfts), math.fsum(ttfts) / len(ttfts)
    return 2.5 * math.sqrt(math.fsum((ttft - mean) ** 2 for ttft in ttfts) / ((count - 1) * count))
