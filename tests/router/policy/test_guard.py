"""Rules of a policy's guard: what binds, what is refused or masked, and what a file may not say."""

from __future__ import annotations

import msgspec
import pytest

from causeway_server.router.checks.cases import read_cases, run_cases
from causeway_server.router.checks.explanation import try_draft
from causeway_server.router.checks.possible import PolicyReplay
from causeway_server.router.decision.abilities import no_route
from causeway_server.router.decision.decide import decide, plan_cache
from causeway_server.router.errors import GuardRefused
from causeway_server.router.guard.classes import GUARD_CLASSES
from causeway_server.router.policy.compiled import check_policy, parse_policy
from causeway_server.router.types import Decision, Estimates, ImagePart, Message, NowSignals, Request, TextPart

from ..checks.recorded import DEVICE, ask, record_of

HEAD = """
version: 1
name: p
targets:
  small: {at: edge, model: a}
  large: {at: cloud, model: b, can: [chat, image]}
"""
TAIL = """
routes: [{name: all, use: [large, small]}]
cache: [{exact: {ttl: 30s}, allow_sampled: true}]
"""
TEXT = f"""{HEAD}
constraints: [{{name: cards-stay, keep: on_device, when: '"card" in pii.classes'}}]
guard:
  rules:
    - {{name: no-keys, action: refuse, when: secrets.count > 0}}
    - {{name: personal, action: mask, when: pii.count > 0, classes: [email, phone]}}
    - {{name: addresses, action: mask, when: '"ip" in pii.classes', classes: [ip]}}
    - {{name: seen, action: audit, when: pii.count > 1}}
{TAIL}"""
POLICY = parse_policy(TEXT)


def facts(*classes: str, pii: int | None = None, secrets: int = 0) -> Estimates:
    return Estimates(pii_classes=classes, pii_count=len(classes) if pii is None else pii, key_count=secrets)


def decided(estimates: Estimates, request: Request | None = None, text: str = "") -> Decision:
    policy = parse_policy(text) if text else POLICY
    return decide(policy, request or ask(), DEVICE, estimates)


def targets(decision: Decision) -> list[str]:
    return [plan.target.name for plan in decision.attempts]


def held(decision: Decision) -> list[str]:
    return [f"{reason.rule}: {reason.detail}" for reason in decision.reasons if reason.code == "guard_held"]


def test_nothing_applies_to_a_clean_request() -> None:
    decision = decided(facts())
    assert (targets(decision), held(decision), decision.mask, decision.refused_by) == (["large", "small"], [], (), "")


def test_every_rule_that_holds_applies() -> None:
    decision = decided(facts("email", "ip"))
    assert held(decision) == ["personal: mask", "addresses: mask", "seen: audit"]
    assert decision.mask == ("email", "ip", "phone")
    assert not decision.on_device


def test_a_constraint_may_name_the_signals() -> None:
    decision = decided(facts("card"))
    assert (decision.on_device, targets(decision)) == (True, ["small"])


@pytest.mark.parametrize("model", ["auto", "large"])
def test_a_refused_request_has_no_attempt_and_says_by_which_rule(model: str) -> None:
    decision = decided(facts(secrets=1), ask(model=model))
    assert (decision.attempts, decision.refused_by) == ((), "no-keys")
    error = no_route(decision)
    assert isinstance(error, GuardRefused)
    assert error.message.startswith("The rule `no-keys` of policy p@")


def test_a_refused_request_is_not_answered_from_the_cache() -> None:
    assert plan_cache(POLICY, ask(), DEVICE, facts("email")).exact is not None
    plan = plan_cache(POLICY, ask(), DEVICE, facts(secrets=1))
    assert (plan.exact, plan.bypass) == (None, "the guard refuses the request")


def test_rules_that_cannot_be_evaluated_apply() -> None:
    decision = decided(Estimates())
    assert decision.refused_by == "no-keys"
    assert decision.on_device
    assert set(held(decision)) == {f"{name}: cannot be evaluated: it binds" for name in
                                   ("no-keys", "personal", "addresses", "seen")}  # fmt: skip


def test_masks_stand_for_text_only_so_parts_stay_or_are_read() -> None:
    seen = ask()
    seen = msgspec.structs.replace(
        seen, messages=(Message("user", (TextPart("a"), ImagePart("data:image/png;base64,"))),)
    )
    text = TEXT.replace("action: mask, when: pii.count > 0", "action: mask")
    assert targets(decided(facts(), seen)) == ["large"]
    bound = decided(facts(), seen, text)
    assert (targets(bound), bound.parts_on_device) == ([], True)
    free = decided(facts(), seen, text.replace("guard:\n", "guard:\n  on_failure: clean\n"))
    assert (targets(free), free.parts_on_device) == (["large"], False)


def test_a_masked_request_has_no_shadow() -> None:
    text = TEXT + "shadow: {share: 1}\n"
    assert decided(facts(), text=text).shadow is not None
    assert decided(facts("email"), text=text).shadow is None


def test_a_policy_without_rules_needs_no_facts() -> None:
    plain = parse_policy(HEAD + TAIL)
    assert not plain.reads_texts
    assert plain.reads_only_features
    assert POLICY.reads_texts


def test_classes_of_a_mask_are_all_unless_named() -> None:
    text = f"{HEAD}guard: {{rules: [{{name: r, action: mask, when: pii.count > 0}}]}}{TAIL}"
    assert decided(facts("email"), text=text).mask == tuple(sorted(GUARD_CLASSES))


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("{name: r, action: refuse, classes: [email], when: pii.count > 0}", "has no effect without `action: mask`"),
        ("{name: r, action: mask, when: 'false'}", "is always false: the rule never applies"),
        ("{name: r, action: refuse}", "refuses every request: it has no condition that may not hold"),
        ("{name: r, action: hide}", "not one of audit, mask, refuse"),
        ("{name: r, action: mask, classes: [passport]}", "not one of"),
        ("{name: r, action: mask, when: pii.counts > 0}", "unknown signal `pii.counts`"),
        ("{name: r, action: mask, when: '\"mail\" in pii.classes'}", "mail"),
        ("{name: r, action: mask, when: pii.count < 0}", "pii.count is at least 0"),
        ("{name: r, action: mask}, {name: r, action: audit}", "the name `r` is used by an earlier rule"),
    ],
)
def test_what_a_rule_may_not_say(rule: str, problem: str) -> None:
    _, problems = check_policy(f"{HEAD}guard: {{rules: [{rule}]}}{TAIL}")
    assert any(problem in str(one) for one in problems), problems


def test_cases_name_what_the_detectors_find() -> None:
    text = """
policy: p.yaml
cases:
  - {name: clean, expect: {mask: [], refused_by: "", targets: [large, small]}}
  - {name: mail, snapshot: {pii: {classes: [email], count: 1}}, expect: {mask: [email, phone]}}
  - {name: key, snapshot: {secrets: {count: 2}}, expect: {refused_by: no-keys, targets: []}}
  - {name: wrong, expect: {mask: [ip]}}
"""
    cases, locations, problems = read_cases(text, "cases.yaml")
    assert cases is not None, problems
    differences = [result.differences for result in run_cases(cases, locations, POLICY)]
    assert differences[:3] == [(), (), ()]
    assert [(one.key, one.expected, one.found) for one in differences[3]] == [("mask", "[ip]", "[]")]


def test_a_draft_is_examined() -> None:
    draft = try_draft(POLICY, "write to anna@example.org", (), NowSignals())
    assert (draft.decision.mask, draft.estimates.pii_classes) == (("email", "phone"), ("email",))
    assert try_draft(POLICY, "AKIAIOSFODNN7EXAMPLE", (), NowSignals()).decision.refused_by == "no-keys"
    assert try_draft(POLICY, "hello", ["secrets.count=1"], NowSignals()).decision.refused_by == "no-keys"


@pytest.mark.parametrize("is_older", [False, True])
def test_a_replay_of_records_without_facts_leaves_both_open(is_older: bool) -> None:
    """Also of records that were written before there were such signals."""
    record = record_of(parse_policy(HEAD + TAIL))
    record = msgspec.structs.replace(record, unrecorded=()) if is_older else record
    found = PolicyReplay(POLICY).possible(record, ask())
    assert {"pii.classes", "pii.count", "secrets.count"} <= set(found.hangs_on)
    assert {decision is not None and decision.refused_by for decision in found.decisions} == {"no-keys", ""}
