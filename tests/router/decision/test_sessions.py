"""Sessions: how a request finds its own, what is pinned, what binds the rest of it, and what leaving a target costs."""

from __future__ import annotations

import msgspec
import pytest

from causeway_server.router.checks.explanation import RouteExplanation, explain
from causeway_server.router.decision.abilities import no_route, pinned_error
from causeway_server.router.decision.decide import decide, plan_cache
from causeway_server.router.decision.sessions import NO_SESSION, answered, bound, keys_of, outcome_of, session_of
from causeway_server.router.errors import AllAttemptsFailed, InvalidRequest, SessionTargetUnavailable
from causeway_server.router.policy.compiled import check_policy, parse_policy
from causeway_server.router.session_tags import read_session
from causeway_server.router.types import (
    Candidate,
    Decision,
    Estimates,
    Message,
    Request,
    RoutingHints,
    Session,
    Snapshot,
    TextPart,
    ToolCall,
)

POLICY = """
version: 1
name: agents
targets:
  small: {at: edge, model: s}
  large: {at: [cloud:eu, cloud:us], model: l, price: {input: 2, cached_input: 0.2}}
  medium: {at: cloud, model: m, price: {input: 1, cached_input: 0.1}}
constraints: [{name: stays, keep: on_device, when: '"private" in request.tags'}]
routes:
  - {name: hot, when: '"hot" in request.tags', use: [medium]}
  - {name: all, use: [small, medium, large], handoff: {after_tokens: 4, below: 0.5}}
session: SESSION
"""
USER, SYSTEM = Message("user", "Where is my parcel?"), Message("system", "Be brief.")
CALL = Message("assistant", None, tool_calls=(ToolCall("call-1", "look", '{"a": 1}'),))
RESULT = Message("tool", "In Bremen.", tool_call_id="call-1")
ASKED = Session(target="large", cloud="us", model="l", warm={"large": 900}, tool_result=True)


def chat(*messages: Message, tags: tuple[str, ...] = (), model: str = "auto") -> Request:
    return Request(kind="chat", model=model, messages=messages, hints=RoutingHints(client="kiosk", tags=tags))


def decided(session: Session | None, rules: str = "{}", request: Request | None = None, text: str = POLICY) -> Decision:
    policy = parse_policy(text.replace("SESSION", rules))
    return decide(policy, request or chat(USER, CALL, RESULT), Snapshot(), Estimates(session=session))


def order(decision: Decision) -> list[str]:
    return [plan.target.key for plan in decision.attempts]


def codes(decision: Decision) -> list[str]:
    return [reason.code for reason in decision.reasons if reason.code.startswith("session")]


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_tools_result_finds_the_turn_that_asked_for_it() -> None:
    before = keys_of(chat(SYSTEM, USER), "kiosk")
    now = keys_of(chat(SYSTEM, USER, CALL, RESULT), "kiosk")
    assert (before.asked, now.asked) == (None, before.after(["call-1"]))
    assert (before.tool_result, now.tool_result) == (False, True)
    assert now.asked not in (before.after(()), before.after(["call-2"]))
    assert keys_of(chat(SYSTEM, USER, CALL, RESULT), "other").asked != now.asked


@pytest.mark.parametrize(
    "call",
    [
        msgspec.structs.replace(CALL, content="", extra='{"reasoning":"…"}'),
        msgspec.structs.replace(CALL, content=(TextPart("Let me see.", '{"cache_control":{}}'),)),
        msgspec.structs.replace(CALL, tool_calls=(ToolCall("call-1", "look", '{"a":1}'),)),
    ],
)
def test_what_clients_change_in_an_answer_does_not_count(call: Message) -> None:
    """Nor does it in earlier answers, of which the ids of calls, their names and the text without its edges count."""
    key = keys_of(chat(USER), "kiosk").after(["call-1"])
    assert keys_of(chat(USER, call, RESULT), "kiosk").asked == key


def test_an_answer_in_several_messages_is_one_turn() -> None:
    """Responses have an item for the text, and one for each call."""
    parts = Message("assistant", "I look."), CALL, msgspec.structs.replace(CALL, tool_calls=(ToolCall("b", "x", "{}"),))
    keys = keys_of(chat(USER, *parts, RESULT), "kiosk")
    assert keys.asked == keys_of(chat(USER), "kiosk").after(["b", "call-1"])
    again = keys_of(chat(USER, *parts, RESULT, Message("assistant", "Bremen"), Message("user", "Thanks")), "kiosk")
    assert again.asked == keys.after(())
    assert not again.tool_result


def test_an_answer_that_the_client_has_begun_is_no_turn() -> None:
    assert keys_of(chat(USER, Message("assistant", "It is")), "kiosk").asked is None


def test_a_named_session_does_not_take_over_another_agents_result() -> None:
    """One name, two agents: each result goes to the turn that asked for it, and the last turn counts for the rest."""
    named = read_session("agents")
    first, second = chat(USER, tags=named), chat(SYSTEM, USER, tags=named)
    states: dict[bytes, Session] = {}
    for request, target, ids in ((first, "small", ["call-1"]), (second, "large", ["call-2"])):
        keys = keys_of(request, "kiosk")
        state = Session(target=target, model="x", at=100.0)
        states |= {keys.after(ids): state, keys.named or b"": state}
    keys = keys_of(chat(USER, CALL, RESULT, tags=named), "kiosk")
    assert session_of(keys, states.get, 100.0).target == "small"
    keys = keys_of(chat(Message("user", "What now?"), tags=named), "kiosk")
    assert session_of(keys, states.get, 100.0).target == "large"


def test_a_binding_holds_under_each_name_of_the_session() -> None:
    keys = keys_of(chat(USER, CALL, RESULT, tags=read_session("a")), "kiosk")
    assert keys.asked is not None
    assert keys.named is not None
    states = {keys.asked: Session(target="large", model="l", regions=("eu", "us")), keys.named: Session(on_device=True)}
    states[keys.after(())] = Session(regions=("eu",))  # a try that failed
    found = session_of(keys, states.get, 0.0)
    assert (found.target, found.on_device, found.regions) == ("large", True, ("eu",))


def test_words_that_were_bound_bind_when_they_are_repeated() -> None:
    """With others after them, too; but not another question after the same history."""
    private = keys_of(chat(USER, CALL, RESULT, Message("user", "My number is 1.")), "kiosk")
    states = dict.fromkeys(private.bindings, Session(on_device=True))
    for more, expected in (
        ((Message("user", "My number is 1."),), True),
        ((Message("user", "My number is 1."), Message("user", "Are you there?")), True),
        ((Message("user", "Are you there?"),), False),
    ):
        keys = keys_of(chat(USER, CALL, RESULT, *more), "kiosk")
        assert session_of(keys, states.get, 0.0).on_device == expected


def test_a_prefix_is_warm_for_some_minutes() -> None:
    keys = keys_of(chat(USER, CALL, RESULT), "kiosk")
    policy = parse_policy(POLICY.replace("SESSION", "{}"))
    state = answered(NO_SESSION, policy.named["large"].targets[0], 700, 1000.0)
    assert state.warm == {"large": 700}
    assert session_of(keys, lambda _: state, 1200.0).warm == {"large": 700}
    assert session_of(keys, lambda _: state, 1400.0).warm == {}


@pytest.mark.parametrize("value", ["", "x" * 257, "a\tb"])
def test_a_name_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest, match="`x-session-id` must have 1 to 256 printable characters"):
        read_session(value)


# --- the pin ----------------------------------------------------------------------------------------------------------


def test_a_tools_result_goes_to_the_target_that_asked() -> None:
    """First, and before the route's order, to the cloud that asked; without a handoff."""
    decision = decided(ASKED)
    assert order(decision) == ["large@us", "large@eu", "small", "medium"]
    assert codes(decision) == ["session_pinned"]
    assert all(plan.handoff is None for plan in decision.attempts)
    hot = decided(ASKED, request=chat(USER, CALL, RESULT, tags=("hot",)))
    assert order(hot) == ["large@us", "large@eu", "medium"]
    assert hot.rule == "hot"


def test_require_allows_no_other_target() -> None:
    decision = decided(ASKED, "{mode: require}")
    assert order(decision) == ["large@us", "large@eu"]
    assert decision.pinned == "large"
    error = pinned_error(decision, AllAttemptsFailed("Every attempt failed: large@us: refused.", retry_after_s=2.0))
    assert isinstance(error, SessionTargetUnavailable)
    assert error.message.startswith("The session stays at `large` (`session.mode: require`). Every attempt failed")
    assert error.retry_after_s == 2.0


@pytest.mark.parametrize(
    ("session", "request_", "because"),
    [
        (ASKED, chat(USER, CALL, RESULT, tags=("private",)), "constraint_excluded: stays"),
        (msgspec.structs.replace(ASKED, target="gone"), None, "the policy no longer has its model"),
        (msgspec.structs.replace(ASKED, model="l2"), None, "the policy no longer has its model"),
        (ASKED, chat(USER, CALL, RESULT, model="small"), "the request names another model"),
    ],
)
def test_require_without_its_target_is_an_error_that_names_it(
    session: Session, request_: Request | None, because: str
) -> None:
    decision = decided(session, "{mode: require}", request_)
    assert decision.attempts == ()
    error = no_route(decision)
    assert error.code == "session_target_unavailable"
    assert error.status == 503
    assert f"The session stays at `{session.target}`" in error.message
    assert because in error.message


def test_prefer_without_its_target_goes_on_and_says_so() -> None:
    decision = decided(msgspec.structs.replace(ASKED, target="gone"))
    assert order(decision) == ["small", "medium", "large@eu", "large@us", "small"]
    outcome = outcome_of(msgspec.structs.replace(ASKED, target="gone"), decision, "small", "s", "all")
    assert outcome.header == "switched; from=gone; reason=session_left"
    named = decided(ASKED, request=chat(USER, CALL, RESULT, model="small"))
    assert order(named) == ["small"]


def test_the_name_of_the_asking_target_or_of_its_model_keeps_the_pin() -> None:
    for name, expected in (
        ("large", ["large@us", "large@eu"]),
        ("l", ["large@us", "large@eu"]),
        ("large@eu", ["large@eu"]),
    ):
        assert order(decided(ASKED, "{mode: require}", chat(USER, CALL, RESULT, model=name))) == expected


def test_a_turn_of_the_user_is_pinned_only_with_the_conversation() -> None:
    spoken = msgspec.structs.replace(ASKED, tool_result=False)
    assert order(decided(spoken)) == ["small", "medium", "large@eu", "large@us", "small"]
    assert order(decided(spoken, "{pin: conversation, mode: require}")) == ["large@us", "large@eu"]


def test_a_pinned_target_that_is_down_is_left_under_prefer_alone() -> None:
    policy = parse_policy(POLICY.replace("SESSION", "{}"))
    down = Snapshot(down=frozenset({"large@us", "large@eu"}))
    decision = decide(policy, chat(USER, CALL, RESULT), down, Estimates(session=ASKED))
    assert order(decision) == ["small", "medium", "large@us", "large@eu"]
    assert outcome_of(ASKED, decision, "small", "s", "all").header == "switched; from=large; reason=target_down"


def test_the_variant_that_asked_answers() -> None:
    text = POLICY.replace(
        "small: {at: edge, model: s}", "small: {at: edge, model: s, variants: [{model: s2, share: 50}]}"
    )
    for model in ("s", "s2"):
        session = Session(target="small", model=model, tool_result=True)
        (plan,) = decided(session, "{mode: require}", text=text).attempts
        assert plan.target.served == model
    assert decided(Session(target="small", model="s3", tool_result=True), "{mode: require}", text=text).attempts == ()


def test_without_session_in_the_policy_nothing_is_pinned_or_bound() -> None:
    text = POLICY.replace("session: SESSION\n", "")
    assert order(decided(msgspec.structs.replace(ASKED, on_device=True), text=text))[0] == "small"


# --- what binds -------------------------------------------------------------------------------------------------------


def test_an_earlier_private_request_binds_the_rest() -> None:
    session = bound(Session(target="small", model="s"), on_device=True, regions=None)
    for request in (chat(USER), chat(USER, model="large"), chat(USER, tags=("hot",))):
        decision = decided(session, request=request)
        assert decision.private
        assert decision.on_device
        assert set(order(decision)) <= {"small"}
        assert "session_bound" in codes(decision)


def test_an_earlier_region_binds_the_rest() -> None:
    session = bound(bound(NO_SESSION, on_device=False, regions=("eu", "us")), on_device=False, regions=("eu",))
    decision = decided(session, request=chat(USER))
    assert decision.regions == ("eu",)
    assert order(decision) == ["small"]  # no cloud of this device has a region


# --- the cost of leaving ----------------------------------------------------------------------------------------------

SCORED = POLICY.replace("use: [small, medium, large], handoff: {after_tokens: 4, below: 0.5}", "use: BEST")
BEST = "{best_of: [small, medium, large], weights: {quality: 1, usd: 100}}"
CANDIDATES = (
    Candidate("edge", "s", quality=0.60, answer_tokens=0.0),
    Candidate("cloud", "m", quality=0.70, answer_tokens=0.0),
    Candidate("cloud", "l", quality=0.72, answer_tokens=0.0),
)


@pytest.mark.parametrize(
    ("rules", "warm", "first"),
    [
        ("{}", {}, "small"),  # 0.60, 0.70 - 0.20, 0.72 - 0.40
        ("{switch_cost: prefix}", {}, "small"),
        ("{switch_cost: prefix}", {"medium": 2000}, "medium"),  # 0.60 - 0.20, 0.70 - 0.02, 0.72 - 0.40 - 0.20
        ("{}", {"medium": 2000}, "small"),
        ("{switch_cost: prefix}", {"medium": 200}, "small"),
    ],
)
def test_leaving_a_target_costs_its_warm_tokens(rules: str, warm: dict[str, int], first: str) -> None:
    policy = parse_policy(SCORED.replace("BEST", BEST).replace("SESSION", rules))
    session = Session(target="medium", model="m", warm=warm)
    estimates = Estimates(prompt_tokens=2000, candidates=CANDIDATES, session=session)
    decision = decide(policy, chat(USER), Snapshot(), estimates)
    assert order(decision)[0] == first
    details = [reason.detail for reason in decision.reasons if reason.code == "target_scored"]
    lost = warm.get("medium", 0)
    assert any(f"{lost} warm tokens left" in detail for detail in details) == (rules != "{}" and bool(warm))


def test_lost_tokens_are_those_that_the_new_target_must_read_again() -> None:
    session = Session(target="large", model="l", warm={"large": 900, "small": 300})
    outcome = outcome_of(session, None, "small", "s", "all")
    assert (outcome.status, outcome.before, outcome.lost_tokens) == ("switched", "large", 600)
    assert outcome_of(session, None, "large", "l", "all").header == "stayed; reason=all"
    assert outcome_of(NO_SESSION, None, "large", "l", "all").header == "new"


# --- the file, and what people read -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        (POLICY.replace("SESSION", "{pin: loop}"), "session.pin", "loop"),
        (POLICY.replace("SESSION", "{switch_cost: prefix}"), "session.switch_cost", "no effect without a route with"),
        (
            SCORED.replace("BEST", BEST).replace("SESSION", "{switch_cost: prefix, pin: conversation}"),
            "session.switch_cost",
            "leaves no target for its price",
        ),
        (
            SCORED.replace("BEST", "{best_of: [small, large]}").replace("SESSION", "{switch_cost: prefix}"),
            "session.switch_cost",
            "`weights.usd` is 0",
        ),
    ],
)
def test_a_key_without_effect_is_named(text: str, path: str, message: str) -> None:
    _, problems = check_policy(text)
    assert [one.message for one in problems if path in str(one.location) and message in one.message]


def test_the_explanation_says_what_is_known_of_the_session() -> None:
    decision = decided(ASKED)
    policy = parse_policy(POLICY.replace("SESSION", "{}"))
    estimates = Estimates(session=ASKED)
    plan = plan_cache(policy, chat(USER), Snapshot(), estimates)
    lines = explain(RouteExplanation(plan, decision, estimates, Snapshot()))
    text = "\n".join(" ".join(segment for segment, _ in line) for line in lines)
    assert "the session stays at large: the tool's result" in text
    assert "its last turn was answered by large (l); 900 tokens warm at large" in text
