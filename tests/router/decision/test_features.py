"""Features of a request: all that routing reads, and no content."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.router.decision.decide import decide, features_of, plan_cache
from causeway_server.router.decision.features import request_of
from causeway_server.router.errors import CausewayError
from causeway_server.router.policy.compiled import parse_policy
from causeway_server.router.policy.signals import ON_DEMAND, SIGNALS
from causeway_server.router.types import Estimates, Message, Prefer, Request, RoutingHints, Snapshot, Tool
from tests.router.openai.values import chat_requests, completion_requests
from tests.router.sample_requests import KIOSK

SECRET = "the secret of the client"
POLICY = parse_policy(KIOSK)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Any request that the parsers let pass, with any hints."""
    request = draw(st.one_of(chat_requests(), completion_requests()))
    names = st.sampled_from(["auto", "small", "large", "assistant", "unknown"])
    prefers: list[Prefer | None] = [None, "only_on_device", "prefer_cloud", "only_cloud", "prefer_on_device"]
    hints = RoutingHints(
        prefer=draw(st.sampled_from(prefers)),
        tags=draw(st.sampled_from([(), ("private",), ("a", "b"), ("\udcff",)])),
        client=draw(st.sampled_from(["", "till-7", "\udcff"])),
        deadline_ms=draw(st.sampled_from([None, 1, 5000])),
    )
    return msgspec.structs.replace(request, model=draw(names), hints=hints)


def _outcome(request: Request) -> object:
    try:
        return decide(POLICY, request, Snapshot(), Estimates())
    except CausewayError as error:
        return type(error), error.message


@pytest.mark.slow
@given(requests())
def test_a_rebuilt_request_has_the_same_signals_and_the_same_decision(request: Request) -> None:
    rebuilt = request_of(features_of(request))
    for spec in SIGNALS.values():
        if spec.name not in ON_DEMAND:
            known = Snapshot(), Estimates()
            assert spec.read(rebuilt, *known) == spec.read(request, *known), spec.name
    assert _outcome(rebuilt) == _outcome(request)
    assert plan_cache(POLICY, rebuilt, Snapshot(), Estimates()) == plan_cache(POLICY, request, Snapshot(), Estimates())
    assert rebuilt.sequences == request.sequences
    assert features_of(rebuilt) == features_of(request), "features of features are the same"


@pytest.mark.slow
@given(requests())
def test_features_can_be_encoded_and_read_again(request: Request) -> None:
    features = features_of(request)
    encoded = msgspec.json.encode(features)
    assert msgspec.json.decode(encoded, type=type(features)) == features


@pytest.mark.parametrize(
    "request_",
    [
        Request(kind="chat", model="auto", messages=(Message("user", SECRET, name=SECRET),), user=SECRET),
        Request(kind="chat", model="auto", tools=(Tool(SECRET, SECRET),), stop=(SECRET,)),
        Request(kind="completion", model="auto", prompts=(SECRET,), suffix=SECRET, extra=f'{{"x":"{SECRET}"}}'),
    ],
)
def test_features_have_no_content(request_: Request) -> None:
    assert SECRET.encode() not in msgspec.json.encode(features_of(request_))


def test_features_are_bounded() -> None:
    """A name that is too long for any policy is cut, and stays unknown to every policy."""
    request = Request(kind="chat", model="x" * 100_000, messages=())
    assert len(msgspec.json.encode(features_of(request))) < 1000
