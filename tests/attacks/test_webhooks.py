"""Webhooks that are to reach into our own network. A receiver listens on loopback; nothing may arrive there."""

from __future__ import annotations

import socket

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from cloud_pool.jobs.config import WebhookConfig
from cloud_pool.jobs.errors import WebhookRefused
from cloud_pool.jobs.webhooks.address import allowed_networks, check_webhook_url
from tests.jobs.conftest import clock, config, database, offer, redis_server, store, stores  # noqa: F401  (fixtures)
from tests.jobs.test_webhooks import Names, Post, post, receiver, url  # noqa: F401  (fixtures)
from tests.jobs.webhook_receiver import Receiver

OPEN = WebhookConfig(allow_http=True, timeout_s=3.0)


class Several(AbstractResolver):
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
async def test_no_spelling_of_the_inside_is_called(post: Post, receiver: Receiver, host: str) -> None:  # noqa: F811
    """However an inner address is written, the delivery waits and the receiver hears nothing."""
    deliverer = post.deliverer(OPEN)
    job = await post.ended_job(url(receiver, host))
    await deliverer.deliver_due()
    assert (receiver.arrived, await post.status(job)) == ([], "pending")


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
def test_a_literal_of_the_inside_is_refused_when_it_is_offered(host: str) -> None:
    """A job with such a webhook is not taken at all; an allow-list for another network changes nothing."""
    for allowed in ((), allowed_networks(WebhookConfig(allowed_networks=("10.200.0.0/16",)))):
        with pytest.raises(WebhookRefused):
            check_webhook_url(f"https://{host}/hook", allow_http=False, allowed=allowed)


@pytest.mark.redis
async def test_an_answer_with_a_good_and_a_bad_address(post: Post, receiver: Receiver) -> None:  # noqa: F811
    """Each address is judged by itself: the good one, where nobody listens, opens no way to the bad one."""
    allowed = WebhookConfig(allowed_networks=("127.0.0.2/32",), allow_http=True, timeout_s=3.0)
    for addresses in (("127.0.0.2", "127.0.0.1"), ("127.0.0.1", "127.0.0.2")):
        deliverer = post.deliverer(allowed, Several(*addresses))
        job = await post.ended_job(url(receiver, "mixed.example.com"))
        await deliverer.deliver_due()
        assert (receiver.arrived, await post.status(job)) == ([], "pending")


@pytest.mark.redis
async def test_a_name_that_turns_between_deliveries(post: Post, receiver: Receiver) -> None:  # noqa: F811
    """What was allowed at the first delivery is looked at anew at the next: the name leads inside now."""
    allowed = WebhookConfig(allowed_networks=("127.0.0.2/32",), allow_http=True, timeout_s=3.0)
    deliverer = post.deliverer(allowed, Names("127.0.0.2", "127.0.0.1"))
    job = await post.ended_job(url(receiver, "rebind.example.com"))
    for _ in range(3):
        await deliverer.deliver_due()
        post.clock.now += 86_400
    assert (receiver.arrived, await post.status(job)) == ([], "pending")


@pytest.mark.redis
async def test_a_redirect_inside_is_not_followed(post: Post, receiver: Receiver) -> None:  # noqa: F811
    """The receiver's address is allowed and sends on to another path of its own: only the first is called."""
    deliverer = post.deliverer(WebhookConfig(allowed_networks=("127.0.0.0/8",), allow_http=True, timeout_s=3.0))
    receiver.answers = [307]
    job = await post.ended_job(url(receiver))
    await deliverer.deliver_due()
    assert (len(receiver.arrived), await post.status(job)) == (1, "pending")
