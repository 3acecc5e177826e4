"""decide and plan_cache: the order, the cuts, the reasons; and what no request can get around."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.decision.decide import decide, model_names, plan_cache
from router.errors import InvalidRequest, ModelNotFound
from router.policy.compiled import Policy, parse_policy
from router.types import (
    AUTO,
    CloudSignals,
    Decision,
    DeviceSignals,
    EdgeSignals,
    Estimates,
    ExactCache,
    Handoff,
    ImagePart,
    Message,
    NowSignals,
    Reason,
    Request,
    ResponseFormat,
    RoutingHints,
    Sampling,
    Snapshot,
    SpendSignals,
    TextPart,
    Tool,
    ToolChoice,
)
from tests.router.sample_requests import KIOSK, chat, kiosk

COOL = Snapshot(device=DeviceSignals(temperature_c=50.0, memory_free_mb=2000.0))
SHORT, LONG = Estimates(prompt_tokens=12), Estimates(prompt_tokens=400)


def targets(decision: Decision) -> list[str]:
    return [plan.target.name for plan in decision.attempts]


def handoffs(decision: Decision) -> list[str]:
    return [plan.target.name for plan in decision.attempts if plan.handoff is not None]


def made(text: str) -> Policy:
    return parse_policy(
        "version: 1\nname: p\ntargets:\n  small: {at: edge, model: a}\n  large: {at: cloud, model: b}\n" + text
    )


# --- routes ----------------------------------------------------------------------------------------------------------


def test_the_first_route_that_holds_decides_and_the_tried_ones_are_told() -> None:
    """The reasons list every rule that was tried, in order, up to the one that held."""
    decision = decide(kiosk(), chat(), COOL, SHORT)
    assert decision.rule == "fast-path"
    assert decision.reasons == (
        Reason("rule_not_held", rule="private-stays"),
        Reason("rule_not_held", rule="hot-device"),
        Reason("rule_held", rule="fast-path"),
    )
    assert (decision.policy, decision.revision) == ("retail-kiosk", kiosk().revision)


def test_a_route_that_needs_an_absent_signal_does_not_hold_and_the_reason_names_it() -> None:
    """Without a thermometer and a token count both rules fall through, and both say why."""
    decision = decide(kiosk(), chat(), Snapshot(device=DeviceSignals(memory_free_mb=2000.0)), Estimates())
    assert decision.rule == "otherwise"
    assert Reason("signal_absent", rule="hot-device", detail="device.temperature_c") in decision.reasons
    assert Reason("signal_absent", rule="fast-path", detail="request.prompt_tokens") in decision.reasons


def test_a_route_whose_condition_breaks_does_not_hold() -> None:
    """A condition that fails at run time is passed over, and the reason carries the failure."""
    policy = made("routes: [{name: a, when: 'request.tags[9] == \"x\"', use: [small]}, {name: b, use: [large]}]")
    decision = decide(policy, chat(), COOL, SHORT)
    assert decision.rule == "b"
    failed = decision.reasons[0]
    assert (failed.code, failed.rule) == ("rule_failed", "a")
    assert "index" in failed.detail


def test_where_no_route_holds_there_is_no_attempt() -> None:
    """A policy without a last resort says that nothing holds, instead of guessing."""
    policy = made("routes: [{name: a, when: request.stream, use: [small]}]")
    decision = decide(policy, chat(), COOL, SHORT)
    assert decision.attempts == ()
    assert decision.rule == ""
    assert decision.reasons[-1] == Reason("no_route", detail="no route holds")


# --- handoff ---------------------------------------------------------------------------------------------------------


def test_a_handoff_has_the_device_itself_as_last_resort() -> None:
    """If everybody after the handoff fails, the unsure device answers after all, without another handoff."""
    decision = decide(kiosk(), chat(), COOL, SHORT)
    assert targets(decision) == ["small", "large", "small"]
    assert [plan.handoff for plan in decision.attempts] == [Handoff(8, 0.55), None, None]


def test_nothing_is_handed_off_to_a_target_that_is_down() -> None:
    """With the cloud known to be away, the device's answer is kept whatever its confidence."""
    decision = decide(kiosk(), chat(), msgspec.structs.replace(COOL, down=frozenset({"large"})), SHORT)
    assert targets(decision) == ["small", "large"]
    assert handoffs(decision) == []


def test_a_device_that_is_down_is_asked_last_and_does_not_hand_off() -> None:
    """The cloud goes first while the engine restarts."""
    decision = decide(kiosk(), chat(), msgspec.structs.replace(COOL, down=frozenset({"small"})), SHORT)
    assert targets(decision) == ["large", "small"]
    assert handoffs(decision) == []
    assert Reason("target_down", target="small") in decision.reasons
    assert decision.skipped_target == "small"


def test_only_on_device_is_never_handed_off() -> None:
    """A handoff inside the device would still break no promise, but there is nobody to hand off to."""
    decision = decide(kiosk(), chat(prefer="only_on_device"), COOL, SHORT)
    assert targets(decision) == ["small"]
    assert handoffs(decision) == []
    assert (decision.on_device, decision.private) == (True, False)


@pytest.mark.parametrize(
    "request_", [chat(prefer="only_on_device"), chat(tags=("private",))], ids=["wish", "constraint"]
)
def test_what_is_bound_to_the_device_is_not_handed_off_inside_it(request_: Request) -> None:
    """Two models on the device and nothing cut: the order stays, the handoff goes."""
    policy = parse_policy("""
version: 1
name: two-on-board
targets: {tiny: {at: edge, model: a}, bigger: {at: edge, model: b}}
constraints: [{name: c, when: '"private" in request.tags', keep: on_device}]
routes: [{name: r, use: [tiny, bigger], handoff: {after_tokens: 4, below: 0.5}}]
""")
    assert handoffs(decide(policy, chat(), COOL, SHORT)) == ["tiny"]
    bound = decide(policy, request_, COOL, SHORT)
    assert targets(bound) == ["tiny", "bigger"]
    assert handoffs(bound) == []


# --- constraints -----------------------------------------------------------------------------------------------------


def test_a_constraint_cuts_every_cloud_target_of_whatever_route_holds() -> None:
    """What a constraint binds stays on the device, and each cut is told."""
    decision = decide(kiosk(), chat(tags=("private",)), COOL, LONG)
    assert targets(decision) == ["small"]
    assert (decision.on_device, decision.private) == (True, True)
    assert [r.target for r in decision.reasons if r.code == "constraint_excluded"] == ["large", "medium"]


@pytest.mark.parametrize("when", ["device.battery < 0.5", "request.tags[9] == 'x'", "edge.quality > 0.5"])
def test_a_constraint_that_cannot_be_told_binds(when: str) -> None:
    """Fail closed: an absent signal or a broken condition keeps the request on the device."""
    policy = made(
        f'routes: [{{name: r, use: [large, small]}}]\nconstraints: [{{name: c, when: "{when}", keep: on_device}}]'
    )
    decision = decide(policy, chat(), COOL, SHORT)
    assert targets(decision) == ["small"]
    assert decision.private
    assert decision.reasons[0].code in ("signal_absent", "rule_failed")
    assert decision.reasons[1] == Reason("constraint_held", rule="c", detail="cannot be evaluated: it binds")


def test_a_constraint_without_condition_always_binds() -> None:
    """`keep: on_device` alone is the whole rule."""
    policy = made("routes: [{name: r, use: [large, small]}]\nconstraints: [{name: c, keep: on_device}]")
    assert targets(decide(policy, chat(), COOL, SHORT)) == ["small"]


@pytest.mark.parametrize("model", ["large", "assistant-large", "medium"])
def test_naming_a_cloud_target_does_not_lift_a_constraint(model: str) -> None:
    """The caller who names the cloud gets no route, with the constraint's name."""
    decision = decide(kiosk(), chat(tags=("private",), model=model), COOL, SHORT)
    assert decision.attempts == ()
    assert any(r.code == "constraint_excluded" and r.rule == "private-stays" for r in decision.reasons)
    assert decision.reasons[-1].code == "no_route"


# --- wishes ----------------------------------------------------------------------------------------------------------


def test_prefer_cloud_moves_the_cloud_forward_within_the_route() -> None:
    """The route's own targets in another order; the device, now last, does not hand off."""
    decision = decide(kiosk(), chat(prefer="prefer_cloud"), COOL, SHORT)
    assert targets(decision) == ["large", "small"]
    assert Reason("preference_ordered", rule="prefer_cloud", target="large") in decision.reasons


def test_prefer_on_device_keeps_the_order_of_the_rest() -> None:
    """Only the wished place moves."""
    decision = decide(kiosk(), chat(prefer="prefer_on_device"), COOL, LONG)
    assert targets(decision) == ["small", "large", "medium"]


def test_prefer_on_device_keeps_the_routes_handoff() -> None:
    """A wish for the device is no wish for a bad answer."""
    decision = decide(kiosk(), chat(prefer="prefer_on_device"), COOL, SHORT)
    assert handoffs(decision) == ["small"]


def test_a_wish_never_adds_a_target() -> None:
    """prefer_cloud on a private request stays on the device; only_cloud leaves nothing."""
    stays = decide(kiosk(), chat(tags=("private",), prefer="prefer_cloud"), COOL, SHORT)
    assert targets(stays) == ["small"]
    nothing = decide(kiosk(), chat(tags=("private",), prefer="only_cloud"), COOL, SHORT)
    assert nothing.attempts == ()
    assert nothing.on_device


# --- models and abilities --------------------------------------------------------------------------------------------


def test_a_target_is_found_by_name_and_by_its_models_name() -> None:
    """A named model needs no route; the policy's timeouts still hold."""
    for model, name in (("small", "small"), ("assistant", "small"), ("assistant-medium", "medium")):
        decision = decide(kiosk(), chat(model=model), Snapshot(), Estimates())
        assert targets(decision) == [name]
        assert decision.rule == ""
        assert Reason("model_named", detail=model) in decision.reasons
        assert not [r for r in decision.reasons if r.code == "signal_absent"]


# --- continuations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [AUTO, "large", "assistant-large"])
def test_a_continuation_goes_where_it_came_from(model: str) -> None:
    """Whatever route would hold now, and to nobody else: no other target has the start of the answer."""
    request = msgspec.structs.replace(chat(model=model), resume="large~token")
    for down in (frozenset[str](), frozenset({"large"})):
        decision = decide(kiosk(), request, msgspec.structs.replace(COOL, down=down), SHORT)
        assert targets(decision) == ["large"]
        assert handoffs(decision) == []
        assert Reason("continued", target="large") in decision.reasons


@pytest.mark.parametrize(
    ("model", "resume"),
    [(AUTO, "token"), (AUTO, "gone~token"), (AUTO, "large~"), (AUTO, "small~token"), ("medium", "large~token")],
    ids=["no edge's", "a target that is gone", "without a token", "the device's", "another model's"],
)
def test_a_token_of_nobody_is_refused(model: str, resume: str) -> None:
    """A 400 that names the field."""
    with pytest.raises(InvalidRequest) as refused:
        decide(kiosk(), msgspec.structs.replace(chat(model=model), resume=resume), COOL, SHORT)
    assert refused.value.param == "causeway.continue"


def test_what_binds_a_request_binds_its_continuation() -> None:
    """A constraint or a wish that keeps it on the device leaves no target: a token opens no way around."""
    for bound in (chat(tags=("private",)), chat(prefer="only_on_device")):
        decision = decide(kiosk(), msgspec.structs.replace(bound, resume="large~token"), COOL, SHORT)
        assert decision.attempts == ()
        assert decision.on_device


def test_the_rest_of_an_answer_is_not_kept() -> None:
    """It answers no question of its own."""
    request = chat(temperature=0.0)
    assert plan_cache(kiosk(), request, COOL, SHORT).exact is not None
    plan = plan_cache(kiosk(), msgspec.structs.replace(request, resume="large~token"), COOL, SHORT)
    assert plan.exact is None
    assert plan.reasons[-1].code == "cache_refused"


def test_all_targets_of_a_named_model_are_tried() -> None:
    """One model in two places: the second is the fallback of the first."""
    policy = parse_policy(KIOSK.replace("model: assistant-medium", "model: assistant-large"))
    assert targets(decide(policy, chat(model="assistant-large"), COOL, SHORT)) == ["large", "medium"]


def test_a_model_that_does_not_exist_is_a_404_that_lists_those_that_do() -> None:
    """The error names the field and every name that works."""
    with pytest.raises(ModelNotFound, match="available: auto, small, large, medium") as caught:
        decide(kiosk(), chat(model="gpt-4o"), COOL, SHORT)
    assert (caught.value.status, caught.value.param) == (404, "model")
    assert model_names(kiosk()) == (AUTO, "small", "large", "medium")


ABILITIES = {
    "embedding": {"kind": "embedding"},
    "image": {"messages": (Message("user", (TextPart("what?"), ImagePart("data:"))),)},
    "tools": {"tools": (Tool("t"),)},
    "json": {"response_format": ResponseFormat("json_object")},
    "logprobs": {"logprobs": 0},
}


@pytest.mark.parametrize("ability", ABILITIES)
def test_a_target_that_cannot_do_it_is_cut(ability: str) -> None:
    """What is asked and not in a target's `can` cuts it, and the reason names the ability."""
    every = ["chat", "embedding", "image", "tools", "json", "logprobs"]
    unable = ", ".join(name for name in every if name != ability)
    policy = parse_policy(f"""
version: 1
name: p
targets:
  large: {{at: cloud, model: b, can: [{unable}]}}
  small: {{at: edge, model: a, can: [{", ".join(every)}]}}
routes: [{{name: r, use: [large, small]}}]
""")
    request = msgspec.structs.replace(chat(), **ABILITIES[ability])
    decision = decide(policy, request, COOL, SHORT)
    assert targets(decision) == ["small"]
    assert Reason("target_unable", target="large", detail=ability) in decision.reasons


def test_tools_that_may_not_be_called_need_no_ability() -> None:
    """tool_choice none asks for plain text."""
    text_only = parse_policy(
        KIOSK.replace("model: assistant-medium", "model: m, can: [chat]").replace(
            "use: [large, medium, small]", "use: [medium]"
        )
    )
    request = msgspec.structs.replace(chat(), tools=(Tool("t"),), tool_choice=ToolChoice("none"))
    assert targets(decide(text_only, request, COOL, LONG)) == ["medium"]
    called = msgspec.structs.replace(request, tool_choice=ToolChoice("auto"))
    assert targets(decide(text_only, called, COOL, LONG)) == []


def test_nobody_able_is_no_route() -> None:
    """An image where nobody sees images is an answer with reasons, not a try."""
    request = msgspec.structs.replace(chat(), **ABILITIES["image"])
    decision = decide(kiosk(), request, COOL, SHORT)
    assert decision.attempts == ()
    assert decision.reasons[-1] == Reason("no_route", rule="fast-path", detail="every target is excluded")


# --- the cache -------------------------------------------------------------------------------------------------------


def test_a_greedy_request_is_cached_as_the_rule_says() -> None:
    """The plan carries both lives of an entry and the rule's name."""
    plan = plan_cache(kiosk(), chat(temperature=0.0), COOL, SHORT)
    assert plan.exact == ExactCache(ttl_s=30.0, stale_if_error_s=600.0)
    assert plan.rule == "cache[0]"
    assert not plan.private


@pytest.mark.parametrize("temperature", [None, 0.7, 1.0])
def test_a_request_without_temperature_zero_is_not_greedy(temperature: float | None) -> None:
    """No temperature is OpenAI's default 1: another run may answer otherwise."""
    plan = plan_cache(kiosk(), chat(temperature=temperature), COOL, SHORT)
    assert plan.exact is None
    assert plan.reasons[-1] == Reason("cache_rule_not_held", rule="cache[0]")


CACHE = "routes: [{name: r, use: [small]}]\ncache: [{name: all, exact: {ttl: 5s}%s}]\n"


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (chat(temperature=0.5), "sampled"),
        (chat(temperature=0.0, n=2), "sampled"),
        (msgspec.structs.replace(chat(temperature=0.5), sampling=Sampling(temperature=0.5, seed=1)), "sampled"),
        (msgspec.structs.replace(chat(temperature=0.0), tools=(Tool("t"),)), "tools"),
    ],
)
def test_sampled_and_tool_requests_are_kept_out_unless_the_rule_says_so(request_: Request, words: str) -> None:
    """A rule that holds is not enough: drawn answers and tool calls need the policy's word."""
    refused = plan_cache(made(CACHE % ""), request_, COOL, SHORT)
    assert refused.exact is None
    assert refused.reasons[-1].code == "cache_refused"
    assert words in refused.reasons[-1].detail
    allowed = plan_cache(made(CACHE % ", allow_sampled: true, allow_tools: true"), request_, COOL, SHORT)
    assert allowed.exact == ExactCache(5.0)


def test_a_rule_without_exact_keeps_its_requests_out() -> None:
    """The first rule that holds decides, also when it decides for nothing."""
    policy = made(
        "routes: [{name: r, use: [small]}]\n"
        "cache: [{name: never, when: '\"live\" in request.tags'}, {name: all, exact: {ttl: 5s}}]"
    )
    assert plan_cache(policy, chat(temperature=0.0, tags=("live",)), COOL, SHORT).exact is None
    assert plan_cache(policy, chat(temperature=0.0), COOL, SHORT).exact == ExactCache(5.0)


def test_a_private_request_is_marked_for_the_cache() -> None:
    """What a constraint binds may be kept in memory only; a constraint that cannot be told marks it too."""
    assert plan_cache(kiosk(), chat(temperature=0.0, tags=("private",)), COOL, SHORT).private
    unknown = made(CACHE % "" + "constraints: [{name: c, when: device.battery < 0.5, keep: on_device}]")
    assert plan_cache(unknown, chat(temperature=0.0), COOL, SHORT).private


def test_without_cache_rules_nothing_is_cached() -> None:
    """No rule, no caching."""
    assert plan_cache(made("routes: [{name: r, use: [small]}]"), chat(temperature=0.0), COOL, SHORT).exact is None


# --- whatever comes --------------------------------------------------------------------------------------------------

numbers = st.none() | st.floats() | st.integers(-(10**25), 10**25)
counts = st.none() | st.integers(-(10**25), 10**25)
flags = st.none() | st.booleans()
snapshots = st.builds(
    Snapshot,
    device=st.builds(DeviceSignals, numbers, flags, numbers, numbers, numbers, numbers),
    edge=st.builds(EdgeSignals, counts, numbers, flags),
    cloud=st.builds(CloudSignals, flags, numbers, st.none() | st.text(max_size=4), st.none() | st.text(max_size=4)),
    spend=st.builds(SpendSignals, numbers, numbers, numbers),
    now=st.builds(NowSignals, counts, counts, counts, counts),
    down=st.frozensets(st.sampled_from(["small", "large", "medium", "other"])),
)
surrogates = st.text(st.characters(), max_size=5)
hints = st.builds(
    RoutingHints,
    prefer=st.none() | st.sampled_from(["prefer_on_device", "only_on_device", "prefer_cloud", "only_cloud"]),
    tags=st.lists(st.just("private") | st.just("held") | surrogates, max_size=3).map(lambda t: tuple(sorted(set(t)))),
    client=surrogates,
    deadline_ms=counts,
)
requests = st.builds(
    Request,
    kind=st.sampled_from(["chat", "completion", "embedding"]),
    model=st.sampled_from([AUTO, "small", "large", "medium", "assistant-large", "nobody"]),
    messages=st.just((Message("user", "hi"),)) | st.just((Message("user", (ImagePart("data:"),)),)),
    max_tokens=counts,
    sampling=st.builds(Sampling, temperature=st.none() | st.floats(0, 2)),
    n=st.integers(1, 3),
    tools=st.just(()) | st.just((Tool("t"),)),
    logprobs=st.none() | st.integers(0, 3),
    hints=hints,
)
estimates = st.builds(Estimates, counts, numbers)
STRICT = parse_policy(
    KIOSK.replace(
        "routes:",
        """  - name: held-when-low
    when: device.battery < 0.5 || "held" in request.tags
    keep: on_device
routes:""",
        1,
    )
)


@settings(max_examples=500, deadline=None)
@given(requests, snapshots, estimates)
def test_nothing_that_is_bound_ever_leaves(request: Request, snapshot: Snapshot, known: Estimates) -> None:
    """For any request, wish and snapshot: on_device means no cloud attempt, and what binds is on_device."""
    try:
        decision = decide(STRICT, request, snapshot, known)
    except ModelNotFound:
        assert request.model == "nobody"
        return
    bound = "private" in request.hints.tags or "held" in request.hints.tags
    battery = snapshot.device.battery
    unknown = battery is None or not math.isfinite(battery)
    if bound or unknown or (battery is not None and battery < 0.5):
        assert decision.on_device
        assert decision.private
        assert plan_cache(STRICT, request, snapshot, known).private
    if request.hints.prefer == "only_on_device":
        assert decision.on_device
    if decision.on_device:
        assert all(plan.target.at == "edge" for plan in decision.attempts)
        assert all(plan.handoff is None for plan in decision.attempts)
    if request.hints.prefer == "only_cloud":
        assert all(plan.target.at == "cloud" for plan in decision.attempts)


@settings(max_examples=300, deadline=None)
@given(requests, snapshots, estimates)
def test_a_decision_only_uses_what_its_route_lists(request: Request, snapshot: Snapshot, known: Estimates) -> None:
    """No wish, failure or handoff brings in a target that the policy did not list; none is tried a third time."""
    try:
        decision = decide(STRICT, request, snapshot, known)
    except ModelNotFound:
        return
    listed = {route.name: {t.name for t in route.targets} for route in STRICT.routes}
    allowed = listed.get(decision.rule, {t.name for t in STRICT.targets if request.model in (t.name, t.model)})
    assert set(targets(decision)) <= allowed
    for plan in decision.attempts:
        assert targets(decision).count(plan.target.name) <= 2
    if decision.attempts:
        assert decision.attempts[-1].handoff is None
    else:
        assert decision.reasons[-1].code == "no_route"
    assert decision == decide(STRICT, request, snapshot, known)
