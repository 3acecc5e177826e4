"""decide and plan_cache: the order, the exclusions, the reasons, and what no request can circumvent."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.router.decision.decide import decide, decide_memoized, features_of, plan_cache
from causeway_server.router.errors import ModelNotFound
from causeway_server.router.policy.compiled import Policy, parse_policy
from causeway_server.router.types import (
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


def test_the_first_route_that_holds_decides_and_reasons_list_the_evaluated_ones() -> None:
    decision = decide(kiosk(), chat(), COOL, SHORT)
    assert decision.rule == "fast-path"
    assert decision.reasons == (
        Reason("rule_not_held", rule="private-stays"),
        Reason("rule_not_held", rule="hot-device"),
        Reason("rule_held", rule="fast-path"),
    )
    assert (decision.policy, decision.revision) == ("retail-kiosk", kiosk().revision)


def test_a_route_that_needs_an_absent_signal_does_not_hold_and_the_reason_names_it() -> None:
    decision = decide(kiosk(), chat(), Snapshot(device=DeviceSignals(memory_free_mb=2000.0)), Estimates())
    assert decision.rule == "otherwise"
    assert Reason("signal_absent", rule="hot-device", detail="device.temperature_c") in decision.reasons
    assert Reason("signal_absent", rule="fast-path", detail="request.prompt_tokens") in decision.reasons


def test_a_route_whose_condition_fails_does_not_hold() -> None:
    policy = made("routes: [{name: a, when: 'request.tags[9] == \"x\"', use: [small]}, {name: b, use: [large]}]")
    decision = decide(policy, chat(), COOL, SHORT)
    assert decision.rule == "b"
    failed = decision.reasons[0]
    assert (failed.code, failed.rule) == ("rule_failed", "a")
    assert "index" in failed.detail


def test_where_no_route_holds_there_is_no_attempt() -> None:
    policy = made("routes: [{name: a, when: request.stream, use: [small]}]")
    decision = decide(policy, chat(), COOL, SHORT)
    assert decision.attempts == ()
    assert decision.rule == ""
    assert decision.reasons[-1] == Reason("no_route", detail="no route holds")


# --- handoff ---------------------------------------------------------------------------------------------------------


def test_a_handoff_has_the_device_itself_as_last_resort() -> None:
    decision = decide(kiosk(), chat(), COOL, SHORT)
    assert targets(decision) == ["small", "large", "small"]
    assert [plan.handoff for plan in decision.attempts] == [Handoff(8, 0.55), None, None]


def test_nothing_is_handed_off_to_a_target_that_is_down() -> None:
    decision = decide(kiosk(), chat(), msgspec.structs.replace(COOL, down=frozenset({"large"})), SHORT)
    assert targets(decision) == ["small", "large"]
    assert handoffs(decision) == []


def test_a_device_that_is_down_is_tried_last_and_does_not_hand_off() -> None:
    decision = decide(kiosk(), chat(), msgspec.structs.replace(COOL, down=frozenset({"small"})), SHORT)
    assert targets(decision) == ["large", "small"]
    assert handoffs(decision) == []
    assert Reason("target_down", rule="fast-path", target="small") in decision.reasons
    assert decision.skipped_target == "small"


def test_only_on_device_is_never_handed_off() -> None:
    decision = decide(kiosk(), chat(prefer="only_on_device"), COOL, SHORT)
    assert targets(decision) == ["small"]
    assert handoffs(decision) == []
    assert (decision.on_device, decision.private) == (True, False)


@pytest.mark.parametrize(
    "request_", [chat(prefer="only_on_device"), chat(tags=("private",))], ids=["preference", "constraint"]
)
def test_a_request_bound_to_the_device_is_not_handed_off_inside_it(request_: Request) -> None:
    """Two models on the device, and nothing is excluded."""
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


def test_a_constraint_excludes_every_cloud_target_of_any_route() -> None:
    decision = decide(kiosk(), chat(tags=("private",)), COOL, LONG)
    assert targets(decision) == ["small"]
    assert (decision.on_device, decision.private) == (True, True)
    assert [r.target for r in decision.reasons if r.code == "constraint_excluded"] == ["large", "medium"]


@pytest.mark.parametrize("when", ["device.battery < 0.5", "request.tags[9] == 'x'", "edge.quality > 0.5"])
def test_a_constraint_that_cannot_be_evaluated_binds(when: str) -> None:
    """An absent signal, or a condition that fails."""
    policy = made(
        f'routes: [{{name: r, use: [large, small]}}]\nconstraints: [{{name: c, when: "{when}", keep: on_device}}]'
    )
    decision = decide(policy, chat(), COOL, SHORT)
    assert targets(decision) == ["small"]
    assert decision.private
    assert decision.reasons[0].code in ("signal_absent", "rule_failed")
    assert decision.reasons[1] == Reason("constraint_held", rule="c", detail="cannot be evaluated: it binds")


def test_a_constraint_without_condition_always_binds() -> None:
    policy = made("routes: [{name: r, use: [large, small]}]\nconstraints: [{name: c, keep: on_device}]")
    assert targets(decide(policy, chat(), COOL, SHORT)) == ["small"]


@pytest.mark.parametrize("model", ["large", "assistant-large", "medium"])
def test_naming_a_cloud_target_does_not_lift_a_constraint(model: str) -> None:
    decision = decide(kiosk(), chat(tags=("private",), model=model), COOL, SHORT)
    assert decision.attempts == ()
    assert any(r.code == "constraint_excluded" and r.rule == "private-stays" for r in decision.reasons)
    assert decision.reasons[-1].code == "no_route"


# --- preferences -----------------------------------------------------------------------------------------------------


def test_prefer_cloud_moves_the_cloud_forward_within_the_route() -> None:
    """The device, now last, does not hand off."""
    decision = decide(kiosk(), chat(prefer="prefer_cloud"), COOL, SHORT)
    assert targets(decision) == ["large", "small"]
    assert Reason("preference_ordered", rule="prefer_cloud", target="large") in decision.reasons


def test_prefer_on_device_keeps_the_order_of_the_rest() -> None:
    decision = decide(kiosk(), chat(prefer="prefer_on_device"), COOL, LONG)
    assert targets(decision) == ["small", "large", "medium"]


def test_prefer_on_device_keeps_the_routes_handoff() -> None:
    decision = decide(kiosk(), chat(prefer="prefer_on_device"), COOL, SHORT)
    assert handoffs(decision) == ["small"]


def test_a_preference_never_adds_a_target() -> None:
    stays = decide(kiosk(), chat(tags=("private",), prefer="prefer_cloud"), COOL, SHORT)
    assert targets(stays) == ["small"]
    nothing = decide(kiosk(), chat(tags=("private",), prefer="only_cloud"), COOL, SHORT)
    assert nothing.attempts == ()
    assert nothing.on_device


# --- models and abilities --------------------------------------------------------------------------------------------


def test_a_target_is_found_by_name_and_by_its_models_name() -> None:
    for model, name in (("small", "small"), ("assistant", "small"), ("assistant-medium", "medium")):
        decision = decide(kiosk(), chat(model=model), Snapshot(), Estimates())
        assert targets(decision) == [name]
        assert decision.rule == ""
        assert Reason("model_named", detail=model) in decision.reasons
        assert not [r for r in decision.reasons if r.code == "signal_absent"]


def test_all_targets_of_a_named_model_are_tried() -> None:
    policy = parse_policy(KIOSK.replace("model: assistant-medium", "model: assistant-large"))
    assert targets(decide(policy, chat(model="assistant-large"), COOL, SHORT)) == ["large", "medium"]


def test_a_model_that_does_not_exist_is_a_404_that_lists_those_that_do() -> None:
    with pytest.raises(ModelNotFound, match="Available: auto, small, large, medium") as caught:
        decide(kiosk(), chat(model="gpt-4o"), COOL, SHORT)
    assert (caught.value.status, caught.value.param) == (404, "model")
    assert kiosk().model_names == (AUTO, "small", "large", "medium")


ABILITIES: dict[str, dict[str, object]] = {
    "embedding": {"kind": "embedding"},
    "image": {"messages": (Message("user", (TextPart("what?"), ImagePart("data:"))),)},
    "tools": {"tools": (Tool("t"),)},
    "json": {"response_format": ResponseFormat("json_object")},
    "logprobs": {"logprobs": 0},
}


@pytest.mark.parametrize("ability", ABILITIES)
def test_a_target_without_the_ability_is_excluded(ability: str) -> None:
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
    assert Reason("target_unable", rule="r", target="large", detail=ability) in decision.reasons


def test_tools_that_may_not_be_called_need_no_ability() -> None:
    text_only = parse_policy(
        KIOSK.replace("model: assistant-medium", "model: m, can: [chat]").replace(
            "use: [large, medium, small]", "use: [medium]"
        )
    )
    request = msgspec.structs.replace(chat(), tools=(Tool("t"),), tool_choice=ToolChoice("none"))
    assert targets(decide(text_only, request, COOL, LONG)) == ["medium"]
    called = msgspec.structs.replace(request, tool_choice=ToolChoice("auto"))
    assert targets(decide(text_only, called, COOL, LONG)) == []


def test_without_an_able_target_there_is_no_route() -> None:
    request = msgspec.structs.replace(chat(), **ABILITIES["image"])
    decision = decide(kiosk(), request, COOL, SHORT)
    assert decision.attempts == ()
    assert decision.reasons[-1] == Reason("no_route", rule="fast-path", detail="every target is excluded")
    assert decision.missing_abilities == ("image",)


def test_abilities_of_other_routes_targets_may_serve_the_request_at_another_time() -> None:
    """Unless the request names a target: then only that one counts."""
    policy = parse_policy(KIOSK.replace("model: assistant-medium", "model: m, can: [chat, image]"))
    request = msgspec.structs.replace(chat(), **ABILITIES["image"])
    private = msgspec.structs.replace(request, hints=RoutingHints(tags=("private",)))
    assert decide(policy, private, COOL, SHORT).attempts == ()
    assert decide(policy, private, COOL, SHORT).missing_abilities == ()
    named = msgspec.structs.replace(request, model="small")
    assert decide(policy, named, COOL, SHORT).missing_abilities == ("image",)


# --- the cache -------------------------------------------------------------------------------------------------------


def test_a_greedy_request_is_cached_as_the_rule_says() -> None:
    plan = plan_cache(kiosk(), chat(temperature=0.0), COOL, SHORT)
    assert plan.exact == ExactCache(ttl_s=30.0, stale_if_error_s=600.0)
    assert plan.rule == "cache[0]"
    assert not plan.private


@pytest.mark.parametrize("temperature", [None, 0.7, 1.0])
def test_a_request_without_temperature_zero_is_not_greedy(temperature: float | None) -> None:
    """Without a temperature OpenAI's default 1 applies."""
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
def test_sampled_and_tool_requests_are_cached_only_if_the_rule_allows_it(request_: Request, words: str) -> None:
    refused = plan_cache(made(CACHE % ""), request_, COOL, SHORT)
    assert refused.exact is None
    assert refused.reasons[-1].code == "cache_refused"
    assert words in refused.reasons[-1].detail
    allowed = plan_cache(made(CACHE % ", allow_sampled: true, allow_tools: true"), request_, COOL, SHORT)
    assert allowed.exact == ExactCache(5.0)


def test_a_rule_without_exact_keeps_its_requests_out() -> None:
    policy = made(
        "routes: [{name: r, use: [small]}]\n"
        "cache: [{name: never, when: '\"live\" in request.tags'}, {name: all, exact: {ttl: 5s}}]"
    )
    assert plan_cache(policy, chat(temperature=0.0, tags=("live",)), COOL, SHORT).exact is None
    assert plan_cache(policy, chat(temperature=0.0), COOL, SHORT).exact == ExactCache(5.0)


def test_a_private_request_is_marked_for_the_cache() -> None:
    """Also if the constraint cannot be evaluated."""
    assert plan_cache(kiosk(), chat(temperature=0.0, tags=("private",)), COOL, SHORT).private
    unknown = made(CACHE % "" + "constraints: [{name: c, when: device.battery < 0.5, keep: on_device}]")
    assert plan_cache(unknown, chat(temperature=0.0), COOL, SHORT).private


def test_without_cache_rules_nothing_is_cached() -> None:
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
    model=st.sampled_from([AUTO, "small", "large", "medium", "assistant-large", "unknown"]),
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


@given(requests, snapshots, estimates)
def test_a_bound_request_never_leaves(request: Request, snapshot: Snapshot, known: Estimates) -> None:
    try:
        decision = decide(STRICT, request, snapshot, known)
    except ModelNotFound:
        assert request.model == "unknown"
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


@given(requests, snapshots, estimates)
def test_a_decision_uses_only_targets_of_its_route(request: Request, snapshot: Snapshot, known: Estimates) -> None:
    """None is tried a third time."""
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


# --- decisions that are remembered -----------------------------------------------------------------------------------

PLAIN_RULES = (
    "routes:\n  - name: bulk\n    when: request.max_tokens > 500 || 'bulk' in request.tags\n    use: [large]\n"
    "  - name: rest\n    use: [small, large]\n"
)
WITH_DEVICE = PLAIN_RULES.replace("request.max_tokens > 500", "device.temperature_c > 80.0")
UP, NO_CLOUD, ABSENT = Snapshot(), Snapshot(down=frozenset({"large"})), Snapshot(absent=frozenset({"small"}))
ASKED = [
    Request(kind="chat", model="auto", messages=(Message("user", "hi"),)),
    Request(kind="chat", model="auto", messages=(Message("user", "another text"),)),
    Request(kind="chat", model="small", messages=(Message("user", "hi"),)),
    Request(kind="chat", model="auto", messages=(Message("user", "hi"),), max_tokens=900),
    Request(kind="chat", model="auto", messages=(Message("user", "hi"),), hints=RoutingHints(tags=("bulk",))),
    Request(kind="chat", model="auto", messages=(Message("user", "hi"),), hints=RoutingHints(prefer="only_on_device")),
    Request(kind="chat", model="auto", messages=(Message("user", "hi"),), tools=(Tool("f"),)),
    Request(kind="chat", model="auto", messages=(Message("user", (ImagePart("data:,x"),)),)),
    Request(kind="embedding", model="auto", prompts=("hi",)),
]


@pytest.mark.parametrize("rules", [PLAIN_RULES, WITH_DEVICE], ids=["features", "device"])
def test_a_remembered_decision_is_the_one_that_would_be_made(rules: str) -> None:
    policy = made(rules)
    for _ in range(2):
        for request in ASKED:
            for snapshot in (UP, NO_CLOUD, ABSENT, COOL):
                remembered = decide_memoized(policy, request, snapshot, SHORT, features_of(request))
                assert remembered == decide(policy, request, snapshot, SHORT)
    assert bool(policy.decisions) == (rules is PLAIN_RULES)


def test_a_request_with_the_features_of_an_earlier_one_is_not_decided_again() -> None:
    policy = made(PLAIN_RULES)
    first, second = (decide_memoized(policy, one, UP, SHORT, features_of(one)) for one in ASKED[:2])
    assert first is second
    assert decide_memoized(policy, ASKED[0], NO_CLOUD, SHORT, features_of(ASKED[0])) is not first


def test_remembered_decisions_are_bounded() -> None:
    policy = made(PLAIN_RULES)
    for limit in range(1, 400):
        request = msgspec.structs.replace(ASKED[0], max_tokens=limit)
        decide_memoized(policy, request, UP, SHORT, features_of(request))
    assert 0 < len(policy.decisions) <= 256


def test_a_model_that_no_target_has_is_refused_each_time() -> None:
    policy, request = made(PLAIN_RULES), msgspec.structs.replace(ASKED[0], model="nothing")
    for _ in range(2):
        with pytest.raises(ModelNotFound):
            decide_memoized(policy, request, UP, SHORT, features_of(request))
