"""The main attacks again over IPv6: the listener's limits, and webhooks to inner addresses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from causeway_server.cloud_pool.config import Flags, load_config
from causeway_server.cloud_pool.storage.config import WebhookConfig
from causeway_server.router.errors import ConfigError
from tests.cloud_pool.http.test_listener import CHAT, error_of, gateway, is_alive, read_to_end, talk
from tests.cloud_pool.jobs.conftest import clock, config, database, new_job, redis_server, store, stores  # noqa: F401  (fixtures)
from tests.cloud_pool.jobs.test_webhooks import ScriptedResolver, WebhookBed, bed, url  # noqa: F401  (fixtures)
from tests.cloud_pool.jobs.webhook_receiver import Receiver, receiving

from .test_framing import INNER, chunked
from .test_slow import LIMIT_S, dripping

pytestmark = pytest.mark.slow

HOST = "::1"
OPEN = WebhookConfig(allow_http=True, timeout_s=3.0)


# --- the listener ----------------------------------------------------------------------------------------------------


async def test_dripping_head_ends_the_connection() -> None:
    async with gateway(read_timeout_s=LIMIT_S, host=HOST) as app:
        async with dripping(app, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n", b"a: b\r\n") as reader:
            assert b" 200 " not in await read_to_end(reader)
        assert await is_alive(app)


async def test_dripping_body_is_408() -> None:
    async with gateway(read_timeout_s=LIMIT_S, host=HOST) as app:
        start = CHAT + b"Connection: close\r\nContent-Length: 900\r\n\r\n{"
        async with dripping(app, start, b" ") as reader:
            assert error_of(await read_to_end(reader)) == (408, "request_timeout")
        assert await is_alive(app)


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (CHAT + b"Content-Length: 99999999\r\nConnection: close\r\n\r\n", 413, "body_too_large"),
        (b"GET /healthz HTTP/1.1\r\nbig: " + b"x" * 100_000 + b"\r\n\r\n", 400, "invalid_value"),
        (b"GET /healthz HTTP/1.1\r\n" + b"a: b\r\n" * 500 + b"\r\n", 400, "invalid_value"),
    ],
)
async def test_too_large_requests_are_refused(sent: bytes, status: int, code: str) -> None:
    """A body, a header, a number of headers."""
    async with gateway(host=HOST) as app:
        assert error_of(await talk(app, sent)) == (status, code)
        assert await is_alive(app)


async def test_request_with_two_lengths_is_refused() -> None:
    async with gateway(read_timeout_s=2.0, host=HOST) as app:
        framing = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(b"{}") + INNER
        answer = await talk(app, CHAT + framing)
        assert answer.count(b"HTTP/1.") == 1
        assert error_of(answer)[0] == 400


async def test_many_slow_clients_do_not_affect_others() -> None:
    async with gateway(read_timeout_s=1.0, host=HOST) as app, contextlib.AsyncExitStack() as stack:
        start = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
        slow = [await stack.enter_async_context(dripping(app, start, b"a")) for _ in range(200)]
        assert await is_alive(app)
        for answer in await asyncio.gather(*(read_to_end(reader) for reader in slow)):
            assert b" 200 " not in answer
        assert await is_alive(app)


@pytest.mark.parametrize("host", ["::", "::ffff:0.0.0.0", "fe80::1", "fd00::1", "2001:db8::1", "::2", "[::1]"])
def test_only_loopback_needs_no_token(tmp_path: Path, host: str) -> None:
    """Any other address, however it is written, is refused at start; so is an invalid one."""
    path = tmp_path / "gateway.yaml"
    path.write_text(f"server: {{host: '{host}', port: 0}}")
    with pytest.raises(ConfigError, match="token"):
        load_config(path, Flags())
    path.write_text(f"server: {{host: '{HOST}', port: 0}}")
    assert load_config(path, Flags()).server.host == HOST


# --- webhooks --------------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def inside() -> AsyncIterator[Receiver]:
    async with receiving(HOST) as found:
        yield found


@pytest.mark.redis
@pytest.mark.parametrize(
    "host",
    [
        "[::1]",
        "[0:0:0:0:0:0:0:1]",
        "[0000:0000:0000:0000:0000:0000:0000:0001]",
        "[::0:1]",
        "[::0.0.0.1]",
        "[::1%25lo]",
        "[::1%lo]",
        "localhost",
        "ip6-localhost",
    ],
)
async def test_no_spelling_of_an_inner_address_is_called(bed: WebhookBed, inside: Receiver, host: str) -> None:  # noqa: F811
    """A receiver listens on ::1 and gets nothing; the delivery waits."""
    sender = bed.sender(OPEN)
    job = await bed.ended_job(url(inside, host))
    await sender.deliver_due()
    assert (inside.arrived, await bed.status(job)) == ([], "pending")


@pytest.mark.redis
@pytest.mark.parametrize(
    "address", ["::1", "::1%lo", "fe80::1%lo", "fe80::1", "fd00::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254"]
)
async def test_no_name_resolves_to_an_inner_address(bed: WebhookBed, inside: Receiver, address: str) -> None:  # noqa: F811
    """Whatever the AAAA record says."""
    sender = bed.sender(OPEN, ScriptedResolver(address))
    job = await bed.ended_job(url(inside, "hooks.example.com"))
    await sender.deliver_due()
    assert (inside.arrived, await bed.status(job)) == ([], "pending")


@pytest.mark.redis
async def test_mapped_address_does_not_reach_ipv4(bed: WebhookBed) -> None:  # noqa: F811
    """An IPv6 socket to ::ffff:127.0.0.1 would arrive at 127.0.0.1, even where other IPv4 networks are allowed."""
    allowed = WebhookConfig(allowed_networks=("10.0.0.0/8", "::1/128"), allow_http=True, timeout_s=3.0)
    async with receiving() as receiver:
        for host, names in (("[::ffff:127.0.0.1]", None), ("mapped.example.com", ScriptedResolver("::ffff:127.0.0.1"))):
            job = await bed.ended_job(url(receiver, host))
            await bed.sender(allowed, names).deliver_due()
            assert (receiver.arrived, await bed.status(job)) == ([], "pending")


@pytest.mark.redis
@pytest.mark.parametrize(("host", "names"), [("[::1]", None), ("hooks.example.com", ScriptedResolver(HOST))])
async def test_delivery_to_an_allowed_network_arrives(
    bed: WebhookBed,  # noqa: F811
    inside: Receiver,
    host: str,
    names: ScriptedResolver | None,
) -> None:
    """So the refusals above are the rule's doing."""
    sender = bed.sender(WebhookConfig(allowed_networks=("::1/128",), allow_http=True, timeout_s=5.0), names)
    job = await bed.ended_job(url(inside, host))
    await sender.deliver_due()
    assert (len(inside.arrived), await bed.status(job)) == (1, "delivered")
