"""What one box has found out about its semantic answers: the promised error rate is tested again on its own traffic.

Some answers to a question that means the same are made anew and compared with the cached one. The judge's threshold
holds until more of them differ than the promise explains; then only likelier matches are used. As requests without
further faults come in, the threshold falls again.
"""

from __future__ import annotations

import math

import msgspec

from .judge import likely_errors

MOST_REQUESTS = 10_000.0  # then older findings count half


class Findings(msgspec.Struct):
    """Counts and log-odds, no content.

    Attributes:
        judge_sha256: Of the judge whose log-odds these are.
        requests: Look-ups, each weighted with the share of semantic answers that are compared.
        compared: Semantic answers that were made anew.
        wrong: The log-odds of those that differed, highest first.
    """

    judge_sha256: str
    requests: float = 0.0
    compared: int = 0
    wrong: list[float] = []

    def look_up(self, share: float) -> bool:
        """Count a look-up, hit or miss; return whether `least_log_odds` may have changed."""
        before = int(self.requests)
        self.requests += share
        if self.requests > MOST_REQUESTS:
            self.requests, self.compared, self.wrong = self.requests / 2, self.compared // 2, self.wrong[::2]
        return int(self.requests) != before

    def compare(self, log_odds: float, *, agreed: bool) -> None:
        """Count a semantic answer that was made anew."""
        self.compared += 1
        if not agreed:
            self.wrong = sorted([*self.wrong, log_odds], reverse=True)

    def merge(self, other: Findings) -> None:
        """Add the findings of an earlier run with the same judge."""
        self.requests += other.requests
        self.compared += other.compared
        self.wrong = sorted([*self.wrong, *other.wrong], reverse=True)

    def least_log_odds(self, max_error: float) -> float:
        """Return what a hit must exceed so that no more answers were wrong than `max_error` explains; else -inf."""
        likely = likely_errors(int(self.requests), max_error)
        return self.wrong[likely] if likely < len(self.wrong) else -math.inf
