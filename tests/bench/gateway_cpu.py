"""`python -m tests.bench gateway-cpu [--beside FOLDER]`: CPU time of the gateway a request and a streamed token.

A scripted Triton, the gateway, a bare grpc.aio reader of the same streams and the load generator are processes of their
own; with `--beside` a gateway of another checkout is one, too. In each round they take turns, with the same number of
requests in flight, so that other work on the machine disturbs all of them alike. Each ratio is the median of the
rounds' own. The cost of a request is that of an answer of one token that is not streamed; the cost of a token is what
a long stream takes more than a short one.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from .rows import Row
from .streaming.load import Plan, Round, Server
from .streaming.run import gateway, median, play, server

PARALLEL, SHORT, LONG, TIMES = 32, 8, 200, 8
GATEWAY, BARE, BESIDE = "gateway", "read", "beside"
WHOLE = "whole"
MAX_OF_BESIDE, MAX_OF_BARE = 0.5, 1.2


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--parallel", type=int, default=PARALLEL)
    parser.add_argument("--beside", type=Path, help="folder of another checkout, with its environment in .venv")


def main(arguments: argparse.Namespace) -> list[Row]:
    with _servers(arguments.beside) as servers:
        contestants = tuple(variant for one in servers for variant in _variants(one))
        rounds = play(Plan(contestants, "assistant-large", arguments.parallel, LONG, arguments.rounds))
    return [*_request_rows(rounds, beside=arguments.beside), *_token_rows(rounds, beside=arguments.beside)]


@contextlib.contextmanager
def _servers(beside: Path | None) -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        triton = stack.enter_context(server("triton", "triton"))
        servers = [
            stack.enter_context(gateway(triton.port)),
            stack.enter_context(server(BARE, "read", f"127.0.0.1:{triton.port}")),
        ]
        if beside is not None:
            other = stack.enter_context(gateway(triton.port, beside.resolve()))
            servers.append(msgspec.structs.replace(other, name=BESIDE))
        yield servers


def _variants(one: Server) -> list[Server]:
    """Return the server with short and long streams, and, for a gateway, with answers that are not streamed."""
    streamed = [msgspec.structs.replace(one, name=f"{one.name} {tokens}", tokens=tokens) for tokens in (SHORT, LONG)]
    if one.name == BARE:
        return streamed
    return [*streamed, msgspec.structs.replace(one, name=f"{one.name} {WHOLE}", tokens=1, whole=True, times=TIMES)]


def _request_rows(rounds: list[Round], *, beside: bool) -> list[Row]:
    def us(one: Round, name: str) -> float:
        return 1e3 * one[f"{name} {WHOLE}"].cpu_ms

    ours_us = median(rounds, lambda r: us(r, GATEWAY))
    rows = [Row("the gateway's CPU time for a request with an answer of one token, not streamed", ours_us, "us")]
    if beside:
        ratio = median(rounds, lambda r: us(r, GATEWAY) / us(r, BESIDE))
        note = f"other version {median(rounds, lambda r: us(r, BESIDE)):.0f} us"
        rows.append(Row("    the same ÷ the other version's CPU time", ratio, "x", MAX_OF_BESIDE, note=note))
    return rows


def _token_rows(rounds: list[Round], *, beside: bool) -> list[Row]:
    def us(one: Round, name: str) -> float:
        """Return the cost of one more token: that of the request cancels."""
        return 1e3 * (one[f"{name} {LONG}"].cpu_ms - one[f"{name} {SHORT}"].cpu_ms) / (LONG - SHORT)

    ours_us, bare_us = (median(rounds, lambda r: us(r, name)) for name in (GATEWAY, BARE))  # noqa: B023
    ratio = median(rounds, lambda r: us(r, GATEWAY) / us(r, BARE))
    note = f"gateway {ours_us:.1f} us, gRPC reader {bare_us:.1f} us"
    rows = [
        Row("CPU time per streamed token: the gateway's ÷ a bare gRPC reader's", ratio, "x", MAX_OF_BARE, note=note)
    ]
    if beside:
        other_us, other = median(rounds, lambda r: us(r, BESIDE)), median(rounds, lambda r: us(r, BESIDE) / us(r, BARE))
        rows.append(
            Row("    the other version's ÷ the gRPC reader's", other, "x", note=f"other version {other_us:.1f} us")
        )
    return rows
