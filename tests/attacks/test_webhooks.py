"""Webhooks to inner addresses. A receiver listens on loopback; nothing may arrive there."""

from __future__ import annotations

import socket

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from causeway_server.cloud_pool.storage.config import WebhookConfig
from causeway_server.router.jobs.webhooks import WebhookRefused, allowed_networks, check_webhook_url
from tests.cloud_pool.jobs.conftest import clock, config, database, new_job, redis_server, store, stores  # noqa: F401  (fixtures)
from tests.cloud_pool.jobs.test_webhooks import ScriptedResolver, WebhookBed, bed, receiver, url  # noqa: F401  (fixtures)
from tests.cloud_pool.jobs.webhook_receiver import Receiver

OPEN = WebhookConfig(allow_http=True, timeout_s=3.0)


class SeveralAddresses(AbstractResolver):
    """A name server whose one answer holds several addresses."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(hostname=host, host=address, port=port, family=socket.AF_INET, proto=0, flags=0)
            for address in self.addresses
        ]

    async def close(self) -> None:
        pass


@pytest.mark.redis
@pytest.mark.parametrize(
    "host",
    [
        "0177.0.0.1",
        "017700000001",
        "0x7f.0.0.1",
        "127.1",
        "127.0.1",
        "0",
        "0.0.0.0",
        "2130706433",
        "4294967297",
        "127.0.0.1.",
        "localhost.",
        "[::]",
        "[::1]",
        "[0:0:0:0:0:0:0:1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[::127.0.0.1]",
        "[64:ff9b::127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "169.254.169.254",
        "[fe80::1]",
        "[fd00:ec2::254]",
    ],
)
async def test_no_spelling_of_an_inner_address_is_called(bed: WebhookBed, receiver: Receiver, host: str) -> None:  # noqa: F811
    """The delivery waits, and the receiver gets nothing."""
    sender = bed.sender(OPEN)
    job = await bed.ended_job(url(receiver, host))
    await sender.deliver_due()
    assert (receiver.arrived, await bed.status(job)) == ([], "pending")


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "10.1.2.3",
        "169.254.169.254",
        "0.0.0.0",
        "[::1]",
        "[::ffff:a9fe:a9fe]",
        "[64:ff9b::a00:1]",
        "[64:ff9b:1::1]",
        "[2002:a00:1::]",
        "[fe80::1]",
        "[fec0::1]",
    ],
)
def test_job_with_an_inner_literal_address_is_refused(host: str) -> None:
    """An allow-list for another network changes nothing."""
    for allowed in ((), allowed_networks(("10.200.0.0/16",))):
        with pytest.raises(WebhookRefused):
            check_webhook_url(f"https://{host}/hook", allow_http=False, allowed=allowed)


@pytest.mark.redis
async def test_each_resolved_address_is_checked(bed: WebhookBed, receiver: Receiver) -> None:  # noqa: F811
    """An allowed address does not admit a forbidden one."""
    allowed = WebhookConfig(allowed_networks=("127.0.0.2/32",), allow_http=True, timeout_s=3.0)
    for addresses in (("127.0.0.2", "127.0.0.1"), ("127.0.0.1", "127.0.0.2")):
        sender = bed.sender(allowed, SeveralAddresses(*addresses))
        job = await bed.ended_job(url(receiver, "mixed.example.com"))
        await sender.deliver_due()
        assert (receiver.arrived, await bed.status(job)) == ([], "pending")


@pytest.mark.redis
async def test_name_is_checked_at_each_delivery(bed: WebhookBed, receiver: Receiver) -> None:  # noqa: F811
    """It was allowed at the first one and resolves to an inner address at the next."""
    allowed = WebhookConfig(allowed_networks=("127.0.0.2/32",), allow_http=True, timeout_s=3.0)
    sender = bed.sender(allowed, ScriptedResolver("127.0.0.2", "127.0.0.1"))
    job = await bed.ended_job(url(receiver, "rebind.example.com"))
    for _ in range(3):
        await sender.deliver_due()
        bed.clock.now += 86_400
    assert (receiver.arrived, await bed.status(job)) == ([], "pending")


@pytest.mark.redis
async def test_redirect_is_not_followed(bed: WebhookBed, receiver: Receiver) -> None:  # noqa: F811
    sender = bed.sender(WebhookConfig(allowed_networks=("127.0.0.0/8",), allow_http=True, timeout_s=3.0))
    receiver.answers = [307]
    job = await bed.ended_job(url(receiver))
    await sender.deliver_due()
    assert (len(receiver.arrived), await bed.status(job)) == (1, "pending")
