"""DESIGN's table of failures, each row with the real part broken."""

from __future__ import annotations

import openai
import psutil
import pytest

from tests.stack import Stack

from .asking import ENDLESS, LONG, SHORT, UNCACHED, ask, read, record, stream

pytestmark = [pytest.mark.triton, pytest.mark.engine, pytest.mark.slow]


def engine_of(stack: Stack) -> psutil.Process:
    return psutil.Process(stack.parts["edge"].popen.pid).children(recursive=True)[0]


def test_with_triton_killed_the_device_answers_and_says_degraded(own_stack: Stack) -> None:
    """Triton dies for good: long asks come from the device, marked degraded; with Triton back, from the cloud again."""
    assert ask(own_stack.edge_url, LONG, temperature=UNCACHED).route == "cloud"
    own_stack.parts["triton"].kill()
    asked = ask(own_stack.edge_url, LONG, temperature=UNCACHED)
    assert (asked.route, asked.target, asked.degraded) == ("edge", "small", True)
    told = record(own_stack.edge_url, asked.id)["outcome"]
    assert told["degraded"] is True
    assert [(a["target"], a["state"]) for a in told["attempts"]][-1] == ("small", "done")
    own_stack.start_triton().ready()
    assert any(ask(own_stack.edge_url, LONG, temperature=UNCACHED).route == "cloud" for _ in range(2000))


def test_triton_killed_mid_stream_is_an_error_event(own_stack: Stack) -> None:
    """After the first byte no other target takes over: the stream ends with an error and never says stop."""
    said: list[str] = []
    chunks = stream(own_stack.edge_url, SHORT, model="large", **ENDLESS)
    with pytest.raises(openai.APIError):
        said.extend(read(chunks, after=3, do=own_stack.parts["triton"].kill))
    assert not {"stop", "length"} & set(said)
    assert ask(own_stack.edge_url, SHORT, temperature=UNCACHED).route == "edge"


def test_engine_killed_mid_stream_is_an_error_event_and_it_comes_back(own_stack: Stack) -> None:
    """The child dies, the daemon does not: an error event now, an answer from the new child next."""
    before = engine_of(own_stack).pid
    chunks = stream(own_stack.edge_url, SHORT, model="small", **ENDLESS)
    with pytest.raises(openai.APIError):
        list(read(chunks, after=3, do=engine_of(own_stack).kill))
    asked = ask(own_stack.edge_url, SHORT, model="small", temperature=UNCACHED)
    assert asked.route == "edge"
    assert engine_of(own_stack).pid != before
    assert own_stack.parts["edge"].popen.poll() is None


def test_with_the_gateway_gone_the_device_answers(own_stack: Stack) -> None:
    """Connection refused is a fallback, and an edge without a cloud goes on answering."""
    own_stack.parts["gateway"].kill()
    asked = ask(own_stack.edge_url, LONG, temperature=UNCACHED)
    assert (asked.route, asked.degraded) == ("edge", True)


def test_drain_leaves_nothing_behind(own_stack: Stack) -> None:
    """SIGTERM ends every part with status 0 and no child process is left."""
    ask(own_stack.edge_url, SHORT)
    families = [child for part in own_stack.parts.values() for child in part.family()]
    assert families
    assert [own_stack.parts[name].stop() for name in ("edge", "gateway", "triton")] == [0, 0, 0]
    assert [child for child in families if child.is_running()] == []
    assert not (own_stack.folder / "edge.sock").exists()
