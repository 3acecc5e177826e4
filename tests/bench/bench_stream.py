"""Streams side by side: what the edge adds to them over a bare forwarder, and the gateway over a bare gRPC reader.

Servers, load generator and upstream are processes of their own; in each round the contestants take turns. Each figure
is the median of the rounds' own ratios.
"""

from __future__ import annotations

import sys

import msgspec

from tests.bench.streaming.load import Plan, Round
from tests.bench.streaming.run import edge, gateway, median, play, server
from tests.tool import run_tool

from .rows import Row

STREAMS, TOKENS, ROUNDS = 32, 64, 15
SHORT, LONG, PARALLEL = 8, 200, 16


def main() -> list[Row]:
    return [*_edge_rows(), _gateway_row()]


def _edge_rows() -> list[Row]:
    with (
        server("direct", "upstream") as direct,
        server("bare", "forward", f"http://127.0.0.1:{direct.port}") as bare,
        edge(direct.port) as ours,
    ):
        rounds = play(Plan((direct, bare, ours), "large", STREAMS, TOKENS, ROUNDS))

    def added(name: str) -> float:
        return median(rounds, lambda r: r[name].first_ms - r["direct"].first_ms)

    def cpu(name: str) -> float:
        return median(rounds, lambda r: r[name].cpu_ms)

    return [
        Row(
            f"{STREAMS} streams of {TOKENS} tokens: time that the edge adds to the first token ÷ a bare forwarder's",
            median(
                rounds,
                lambda r: (r["edge"].first_ms - r["direct"].first_ms) / (r["bare"].first_ms - r["direct"].first_ms),
            ),
            "x",
            2.0,
            note=f"edge {added('edge'):.2f} ms, bare forwarder {added('bare'):.2f} ms; a token every 5 ms",
        ),
        Row(
            "    CPU time per stream: the edge's ÷ a bare forwarder's",
            median(rounds, lambda r: r["edge"].cpu_ms / r["bare"].cpu_ms),
            "x",
            1.3,
            note=f"edge {cpu('edge'):.2f} ms, bare forwarder {cpu('bare'):.2f} ms",
        ),
    ]


def _gateway_row() -> Row:
    with (
        server("triton", "triton") as triton,
        server("read", "read", f"127.0.0.1:{triton.port}") as reader,
        gateway(triton.port) as ours,
    ):
        contestants = tuple(
            msgspec.structs.replace(one, name=f"{one.name} {tokens}", tokens=tokens)
            for one in (ours, reader)
            for tokens in (SHORT, LONG)
        )
        rounds = play(Plan(contestants, "assistant-large", PARALLEL, LONG, ROUNDS))

    def token_us(one: Round, name: str) -> float:
        """Of one more token: the cost of the request cancels."""
        return 1e3 * (one[f"{name} {LONG}"].cpu_ms - one[f"{name} {SHORT}"].cpu_ms) / (LONG - SHORT)

    ours_us, bare_us = (median(rounds, lambda r: token_us(r, name)) for name in ("gateway", "read"))  # noqa: B023
    return Row(
        "    CPU time per streamed token: the gateway's ÷ a bare gRPC reader's",
        median(rounds, lambda r: token_us(r, "gateway") / token_us(r, "read")),
        "x",
        1.5,
        note=f"gateway {ours_us:.1f} us, gRPC reader {bare_us:.1f} us; {PARALLEL} streams, a token every 5 ms",
    )


def _print_rows() -> None:
    for row in main():
        print(f"{row.name}: {row.value:.2f} {row.unit} (limit {row.limit})  {row.note}")


if __name__ == "__main__":
    sys.exit(run_tool(_print_rows))
