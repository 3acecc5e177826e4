"""One trace from the device into the model, with daemon, gateway and Triton as real programs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Coroutine, Iterator
from typing import TypeVar

import pytest
import urllib3

from tests.redis_server import RedisServer
from tests.redis_server import redis_server as redis_server  # a fixture
from tests.stack import TOKEN, Stack

from .collector import Collector, Span

pytestmark = [pytest.mark.triton, pytest.mark.redis, pytest.mark.engine]

T = TypeVar("T")
CALLER = "00-{:032x}-b7ad6b7169203331-01"
ASKS = 5  # of a single request Triton was seen to export nothing
NAMES = ("chat large", "attempt large", "chat assistant-large", "triton assistant-large", "InferRequest")


class Background:
    """A collector in an event loop and a thread of its own: the test's thread waits for programs."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.collector = self._run(Collector().start())

    def until(self, names: Collection[str]) -> list[Span]:
        return self._run(asyncio.wait_for(self.collector.until(names), 60))

    def close(self) -> None:
        self._run(self.collector.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, work: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> Iterator[tuple[Stack, Background]]:
    background = Background()
    url = background.collector.url
    folder = tmp_path_factory.mktemp("traced")
    stack = Stack(folder)
    config = folder / "gateway.yaml"
    config.write_text(
        f"tracing: {{endpoint: '{url}'}}\nlog_format: json\nlog: debug\nredis: {redis_server.url}\n"
        "cache: {enabled: true, redis_timeout_s: 5.0, lease_s: 20.0}\n"
    )
    try:
        stack.start_triton("--trace-endpoint", url).ready()
        stack.start_gateway("--config", str(config)).ready()
        stack.start_worker("--config", str(config)).ready()
        stack.start_edge(f"tracing: {{endpoint: '{url}'}}\n").ready()
        stack.wait_until_loaded()
        yield stack, background
        stack.close()
    finally:
        for part in stack.parts.values():
            if part.popen.poll() is None:
                part.kill()
        background.close()


def test_one_trace_leads_from_the_device_into_the_model(traced: tuple[Stack, Background]) -> None:
    """Each program's span is a child of the one before; no span has content."""
    stack, background = traced
    answers = {}
    for number in range(1, ASKS + 1):
        ask = {"model": "large", "messages": [{"role": "user", "content": f"wake me up at {number}, mysecretword"}]}
        url, headers = f"{stack.edge_url}/v1/chat/completions", {"traceparent": CALLER.format(number)}
        answers[f"{number:032x}"] = urllib3.request("POST", url, json=ask, headers=headers, retries=False)
    assert {answer.status for answer in answers.values()} == {200}
    spans = background.until(NAMES)
    answer = answers[spans[0].trace]
    by_name = {(span.service, span.name): span for span in spans}
    edge = by_name["causeway-edge", "chat large"]
    attempt = by_name["causeway-edge", "attempt large"]
    gateway = by_name["causeway-gateway", "chat assistant-large"]
    call = by_name["causeway-gateway", "triton assistant-large"]
    tritons = [span for span in spans if span.service == "causeway-triton"]
    assert (edge.parent, attempt.parent, gateway.parent, call.parent) == (
        "b7ad6b7169203331", edge.id, attempt.id, gateway.id,
    )  # fmt: skip
    assert any(span.parent == call.id for span in tritons)
    usage = answer.json()["usage"]
    for span in (edge, gateway):
        assert span.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert gateway.attributes["causeway.request"] == answer.headers["x-causeway-decision"]
    assert gateway.events == ("admitted",)
    assert call.events == ("first token",)
    assert "mysecretword" not in repr(spans)


def test_one_trace_leads_from_a_job_into_the_model(traced: tuple[Stack, Background]) -> None:
    """Accepted by the gateway, run by the worker, answered by Triton; a second one comes from the cache."""
    stack, background = traced
    ask = {"model": "assistant-large", "messages": [{"role": "user", "content": "dim the lights, mysecretword"}]}
    url, token = f"{stack.gateway_url}/v1/jobs", {"authorization": f"Bearer {TOKEN}"}
    jobs = {}
    for number in range(101, 101 + ASKS):
        headers = token | {"traceparent": CALLER.format(number), "cache-control": "no-store"}
        sent = urllib3.request("POST", url, json=ask, headers=headers, retries=False)
        assert sent.status == 202, sent.data
        jobs[f"{number:032x}"] = sent.json()["id"]
    whole = ("send assistant-large", "receive assistant-large", "process assistant-large")
    spans = background.until((*whole, "triton assistant-large", "InferRequest"))
    by_name = {span.name: span for span in spans}
    send, receive, process = (by_name[name] for name in whole)
    assert [span.service for span in (send, receive, process)] == [
        "causeway-gateway", "causeway-worker", "causeway-worker",
    ]  # fmt: skip
    assert (send.parent, receive.links, process.links) == ("b7ad6b7169203331", (send.id,), (send.id,))
    assert by_name["triton assistant-large"].parent == process.id
    assert process.attributes["messaging.message.id"] == jobs[spans[0].trace]
    assert process.attributes["causeway.cache"] == "bypass"

    for number, status in ((111, "miss"), (112, "hit")):
        headers = token | {"traceparent": CALLER.format(number)}
        name = urllib3.request("POST", url, json=ask, headers=headers, retries=False).json()["id"]
        events = urllib3.request("GET", f"{url}/{name}/events", headers=token, retries=False)
        assert b"event: succeeded" in events.data
        view = urllib3.request("GET", f"{url}/{name}", headers=token, retries=False).json()
        assert view["cache"] == status
        found = view["result"]["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert found == (view["result"]["usage"]["prompt_tokens"] if status == "hit" else 0)
    assert "mysecretword" not in repr(background.collector.spans)


def test_gateways_json_log_names_the_request(traced: tuple[Stack, Background]) -> None:
    """A failed request's line has the edge's id; no line has content."""
    stack, _ = traced
    body = {"model": "assistant-large", "messages": [{"role": "user", "content": "mysecretword"}], "max_tokens": 5}
    headers = {"authorization": "Bearer edge-under-test", "x-request-id": "the-one", "x-causeway-deadline-ms": "1"}
    refused = urllib3.request(
        "POST", f"{stack.gateway_url}/v1/chat/completions", json=body, headers=headers, retries=False
    )
    assert refused.status >= 400
    text = (stack.folder / "gateway.log").read_text()
    assert '"request": "the-one"' in text
    assert "mysecretword" not in text
