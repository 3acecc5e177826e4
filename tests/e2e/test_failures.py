"""The table of failures in DESIGN.md, with the real part broken."""

from __future__ import annotations

import openai
import psutil
import pytest

from tests.stack import Stack

from .requests import LONG, LONG_ANSWER, SHORT, UNCACHED, ask, read, record, stream

pytestmark = [pytest.mark.triton, pytest.mark.engine, pytest.mark.slow]


def engine_of(stack: Stack) -> psutil.Process:
    return psutil.Process(stack.parts["edge"].popen.pid).children(recursive=True)[0]


def test_with_triton_killed_the_device_gives_degraded_answers(own_stack: Stack) -> None:
    """When Triton is back, the cloud answers again."""
    assert ask(own_stack.edge_url, LONG, temperature=UNCACHED).route == "cloud"
    own_stack.parts["triton"].kill()
    answer = ask(own_stack.edge_url, LONG, temperature=UNCACHED)
    assert (answer.route, answer.target, answer.degraded) == ("edge", "small", True)
    outcome = record(own_stack.edge_url, answer.id)["outcome"]
    assert outcome["degraded"] is True
    assert [(attempt["target"], attempt["state"]) for attempt in outcome["attempts"]][-1] == ("small", "done")
    own_stack.start_triton().ready()
    assert any(ask(own_stack.edge_url, LONG, temperature=UNCACHED).route == "cloud" for _ in range(2000))


def test_triton_killed_during_a_stream_is_an_error_event(own_stack: Stack) -> None:
    """After the first byte no other target takes over, and `finish_reason` is never stop."""
    pieces: list[str] = []
    chunks = stream(own_stack.edge_url, SHORT, model="large", **LONG_ANSWER)
    with pytest.raises(openai.APIError):
        pieces.extend(read(chunks, after=3, do=own_stack.parts["triton"].kill))
    assert not {"stop", "length"} & set(pieces)
    assert ask(own_stack.edge_url, SHORT, temperature=UNCACHED).route == "edge"


def test_an_engine_killed_during_a_stream_is_an_error_event_and_restarts(own_stack: Stack) -> None:
    """The daemon lives on; the next answer comes from the new engine process."""
    before = engine_of(own_stack).pid
    chunks = stream(own_stack.edge_url, SHORT, model="small", **LONG_ANSWER)
    with pytest.raises(openai.APIError):
        list(read(chunks, after=3, do=engine_of(own_stack).kill))
    answer = ask(own_stack.edge_url, SHORT, model="small", temperature=UNCACHED)
    assert answer.route == "edge"
    assert engine_of(own_stack).pid != before
    assert own_stack.parts["edge"].popen.poll() is None


def test_with_the_gateway_killed_the_device_answers(own_stack: Stack) -> None:
    own_stack.parts["gateway"].kill()
    answer = ask(own_stack.edge_url, LONG, temperature=UNCACHED)
    assert (answer.route, answer.degraded) == ("edge", True)


def test_sigterm_ends_every_program_with_status_0_and_leaves_nothing_behind(own_stack: Stack) -> None:
    ask(own_stack.edge_url, SHORT)
    descendants = [child for part in own_stack.parts.values() for child in part.descendants()]
    assert descendants
    assert [own_stack.parts[name].stop() for name in ("edge", "gateway", "triton")] == [0, 0, 0]
    assert [child for child in descendants if child.is_running()] == []
    assert not (own_stack.folder / "edge.sock").exists()
