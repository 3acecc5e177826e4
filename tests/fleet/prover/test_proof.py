"""Proofs of policies: what is proved, what is refuted, and that each counterexample fails when it is run."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
import yaml
import z3

from causeway_server.fleet.cli.proofs import case_text
from causeway_server.fleet.prover.proof import Proof, prove
from causeway_server.fleet.prover.witness import Excluded, Witness
from causeway_server.fleet.repository.policies import policy_files
from causeway_server.router.checks.cases import read_cases, run_cases
from causeway_server.router.policy.compiled import Policy, parse_policy

from .policies import ABILITIES, drawn

ROOT = Path(__file__).parents[3]
SHIPPED = policy_files((ROOT / "policies", ROOT / "examples" / "policies"))
WITH_CLAIMS = [path for path in SHIPPED if "claims:" in path.read_text()]
BASE = """
version: 1
name: base
targets:
  small: {at: edge, model: assistant}
  large: {at: cloud, model: assistant-large}
  far: {at: ["cloud:eu", "cloud:us"], model: big, can: [chat, image]}
constraints:
  - {name: private-stays, keep: on_device, when: '"private" in request.tags'}
  - {name: home, keep: in_region, regions: [eu], when: '"resident" in request.tags'}
routes:
  - {name: short, when: request.prompt_tokens < 48, use: [small, large], handoff: {after_tokens: 8, below: 0.5}}
  - {name: otherwise, use: [large, far, small]}
cache:
  - {name: greedy, when: request.temperature == 0, exact: {ttl: 30s}}
shadow: {share: 0.1}
session: {pin: tool_loop}
"""


def policy_with(**parts: object) -> Policy:
    return parse_policy(yaml.safe_dump({**yaml.safe_load(BASE), **parts}))


def is_failing(proof: Proof, policy: Policy) -> bool:
    """Return whether the printed case fails under a policy."""
    text = f"policy: p.yaml\ncases:\n{case_text(proof)}"
    cases, locations, problems = read_cases(text, "cases.yaml")
    assert cases is not None, problems
    (result,) = run_cases(cases, locations, policy)
    return [one.key for one in result.differences] == ["holds"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_policy_is_proved(path: Path) -> None:
    proofs = prove(parse_policy(path.read_text()))
    assert [proof for proof in proofs if proof.status != "proved"] == []
    assert any(proof.kind == "keep" for proof in proofs) or "constraints" not in path.read_text()


# Each lets a request with the tag `private` leave; `{}` is the condition of the constraint as it was.
WEAKER = (
    *("{} && device.battery < 0.9", "{} && has(device.battery)", "{} && request.prompt_tokens < 4000"),
    *("{} && cloud.reachable == false", "{} && !('vip' in request.tags)", "{} && request.client != 'admin'"),
    *("{} && request.kind == 'chat'", "{} && !request.tools", "{} && size(request.tags) == 1"),
    *("'privat' in request.tags", "request.tags.all(t, t == 'private') && size(request.tags) > 0"),
    *("{} && now.hour >= 8", "{} ? request.n < 3 : false", "{} && device.temperature_c * 2.0 < 180.0"),
    *("{} && !request.client.startsWith('kiosk-')", "{} && request.prefer != 'prefer_cloud'", "!({})"),
)  # fmt: skip


def leaks() -> list[tuple[str, str]]:
    """Return names and texts of policies that leak, made of those that ship with a claim."""
    found = []
    for path in WITH_CLAIMS:
        document = yaml.safe_load(path.read_text())
        if path.stem == "private":
            document["targets"]["large"] = {"at": "cloud", "model": "assistant-large"}
            document["routes"][0]["use"] = ["small", "large"]
            document["constraints"][0]["when"] = '"private" in request.tags'
        constraint = document["constraints"][0]
        when = constraint["when"]
        for number, weaker in enumerate(WEAKER):
            constraint["when"] = weaker.format(f"({when})")
            found.append((f"{path.stem}-weaker-{number}", yaml.safe_dump(document)))
        constraint["when"], constraint["keep"] = when, "parts_on_device"
        found.append((f"{path.stem}-parts", yaml.safe_dump(document)))
        del document["constraints"][0]
        found.append((f"{path.stem}-dropped", yaml.safe_dump(document)))
    return found


LEAKS = leaks()


def test_there_are_fifty_leaks() -> None:
    assert len(LEAKS) >= 50


@pytest.mark.parametrize(("name", "text"), LEAKS, ids=[name for name, _ in LEAKS])
def test_a_leak_is_refuted_by_a_case_that_fails(name: str, text: str) -> None:
    policy = parse_policy(text)
    (proof,) = prove(policy, kinds=("claim",))
    assert proof.status == "refuted", name
    assert is_failing(proof, policy)
    original = next(path for path in WITH_CLAIMS if name.startswith(path.stem))
    assert not is_failing(proof, parse_policy(original.read_text()))


CLAIMS = {
    # of all requests
    "!outcome.leaves || !outcome.shared": "refuted",
    "outcome.edge || outcome.leaves || outcome.targets == []": "undecided",
    "outcome.edge || outcome.leaves || size(outcome.targets) == 0": "proved",
    "outcome.first != '' || size(outcome.targets) == 0": "proved",
    "size(outcome.targets) <= 3": "proved",
    "size(outcome.targets) <= 2": "refuted",
    "outcome.first != 'far' || outcome.route == ''": "refuted",
    # ways out
    "!('resident' in request.tags) || outcome.regions.all(r, r == 'eu')": "proved",
    "!('resident' in request.tags) || !outcome.shadow": "proved",
    "!('in-region:us' in request.tags) || outcome.regions.all(r, r == 'us')": "proved",
    "!('in-region:us' in request.tags) || !outcome.leaves": "refuted",
    "request.prefer != 'only_on_device' || !outcome.leaves": "proved",
    "request.prefer != 'prefer_on_device' || !outcome.leaves": "refuted",
    "!outcome.handoff || outcome.route == 'short'": "proved",
    "!outcome.handoff": "refuted",
    "!outcome.shadow || request.n == 1": "proved",
    "!outcome.parts_leave": "refuted",
    "!('audio' in request.modalities) || !outcome.parts_leave || 'image' in request.modalities": "proved",
    "!outcome.cached || request.temperature == 0.0": "proved",
    "!outcome.refused": "proved",
    # signals that may be absent
    "device.battery > 0.2 || device.battery <= 0.2": "refuted",
    "!has(device.battery) || device.battery > 0.2 || device.battery <= 0.2": "proved",
    "!has(device.battery) || device.battery <= 1.0": "proved",
    "now.hour < 24 && request.n > 0": "proved",
    # numbers of 64 bits
    "!has(request.max_tokens) || request.max_tokens * 100 > 0 || request.max_tokens == 0": "refuted",
    "!has(request.max_tokens) || request.max_tokens + 1 > 1 || request.max_tokens == 0": "proved",
    "!has(request.max_tokens) || request.max_tokens / 2 <= request.max_tokens": "proved",
    "!has(device.power_w) || device.power_w + 1.0 > device.power_w": "refuted",
    "!has(spend.usd_hour) || spend.usd_hour - spend.usd_hour == 0.0": "proved",
    "int(request.temperature) <= 2 && double(request.n) >= 1.0": "proved",
    # texts
    "!request.client.startsWith('kiosk-') || request.client.contains('kiosk')": "proved",
    "!request.client.startsWith('kiosk-1') || request.client.endsWith('1')": "refuted",
    "!request.client.matches('^k[0-9]+$') || request.client.startsWith('k')": "proved",
    "!request.client.matches('^k[0-9]{2}$') || request.client < 'k5'": "refuted",
    "request.tags.all(t, !t.startsWith('team-')) || request.tags.exists(t, t.contains('eam'))": "proved",
    "size(request.tags) < 4": "refuted",
    "request.tags.map(t, t + 'x') != ['ax']": "undecided",
}  # fmt: skip


@pytest.mark.parametrize(("holds", "status"), CLAIMS.items(), ids=list(CLAIMS))
def test_a_claim_of_the_owner(holds: str, status: str) -> None:
    policy = policy_with(claims=[{"name": "own", "holds": holds}])
    (proof,) = prove(policy, kinds=("claim",))
    assert (proof.status, bool(proof.why)) == (status, status == "undecided"), proof
    assert (proof.case is not None) == (status == "refuted")
    assert proof.case is None or is_failing(proof, policy)


@pytest.mark.parametrize(
    ("when", "is_dead"),
    [
        ("request.prompt_tokens < 40", False),
        ("request.prompt_tokens < 48 && request.prompt_tokens > 60", True),
        ("device.battery > 0.5 || !(device.battery > 0.5)", False),
        ("device.throttled && request.tags.exists(t, t == 'a' && t == 'b')", True),
        ("request.prompt_tokens * 2 == 7", True),
        ("request.client.startsWith('a') && request.client.startsWith('b')", True),
        ("request.client.matches('^[ab]+$') && request.client.endsWith('c')", True),
    ],
)
def test_a_rule_that_no_request_reaches_is_refuted(when: str, *, is_dead: bool) -> None:
    routes = [{"name": "first", "when": when, "use": ["small"]}, {"name": "otherwise", "use": ["small"]}]
    found = {proof.name: proof.status for proof in prove(policy_without(routes), kinds=("reach",))}
    assert found["first"] == ("refuted" if is_dead else "proved")
    assert found["otherwise"] == "proved"


def policy_without(routes: object) -> Policy:
    document = {**yaml.safe_load(BASE), "routes": routes}
    del document["shadow"]
    return parse_policy(yaml.safe_dump(document))


def test_a_rule_after_one_that_holds_wherever_it_does_is_dead() -> None:
    routes = [
        {"name": "long", "when": "request.prompt_tokens > 100", "use": ["small"]},
        {"name": "longer", "when": "request.prompt_tokens > 200 && device.battery > 0.5", "use": ["small"]},
        {"name": "otherwise", "use": ["small"]},
    ]
    found = {proof.name: proof.status for proof in prove(policy_without(routes), kinds=("reach",))}
    assert found == {"long": "proved", "longer": "refuted", "otherwise": "proved", "greedy": "proved"}


NEWER: dict[str, tuple[dict[str, object], set[str]]] = {
    "the same": ({}, set()),
    "fewer ways out": ({"routes": [{"name": "r", "use": ["small", "large"], "when": "request.n == 1"}]}, set()),
    "a constraint less": ({"constraints": []}, {"leaves-no-more", "parts-leave-no-more"}),
    "a wider region": (
        {"constraints": [{"name": "home", "keep": "in_region", "regions": ["eu", "us"], "when": "request.n == 1"}]},
        {"leaves-no-more", "parts-leave-no-more"},
    ),
    "images for the cloud": (
        {"targets": {**yaml.safe_load(BASE)["targets"], "large": {"at": "cloud", "model": "l", "can": ABILITIES}}},
        {"leaves-no-more", "parts-leave-no-more"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEWER)
def test_what_a_newer_policy_lets_leave(name: str) -> None:
    """Each case of a refuted statement fails under the newer policy and passes under the older one."""
    parts, refuted = NEWER[name]
    new, old = policy_with(**parts), policy_with()
    proofs = prove(new, old, kinds=("compare",))
    assert {proof.name for proof in proofs if proof.status == "refuted"} == refuted
    assert {proof.status for proof in proofs if proof.name not in refuted} <= {"proved"}
    assert all(is_failing(one, new) and not is_failing(one, old) for one in proofs if one.name in refuted)


ADAPTED = {
    "small": {"at": "edge", "model": "assistant+routes", "variants": [{"model": "assistant-next", "share": 5}]},
    "large": {"at": "cloud", "model": "assistant-large"},
}
ROUTES = [{"name": "all", "use": ["small", "large"]}]


@pytest.mark.parametrize(
    ("model", "variant", "status"),
    [
        (
            "assistant+routes",
            "assistant-next",
            "refuted",
        ),  # an adapter's answers have no shadow, a variant's without do
        ("assistant+routes", "assistant-next+routes", "proved"),
        ("assistant", "assistant+routes", "refuted"),
        ("assistant+routes", None, "proved"),
    ],
)
def test_a_variant_may_send_what_its_target_would_not(model: str, variant: str | None, status: str) -> None:
    """The counterexample names the variant, fails when it is run, and passes without the variant."""
    variants = [] if variant is None else [{"model": variant, "share": 5}]
    targets = {**ADAPTED, "small": {"at": "edge", "model": model, "variants": variants}}
    parts = {"targets": targets, "routes": ROUTES, "constraints": []}
    claim = {"name": "alone", "holds": "!outcome.shadow"}
    policy = policy_with(**parts, claims=[claim])
    (proof,) = prove(policy, kinds=("claim",))
    assert proof.status == status
    if proof.case is not None:
        assert is_failing(proof, policy)
        assert proof.case.snapshot.variants == ({"small": variant} if "+" in model else {})


def test_no_claim_is_proved_that_a_variant_breaks() -> None:
    """Whichever model answers. Each counterexample fails when it is run."""
    claims = [
        {"name": "stays", "when": "'private' in request.tags", "holds": "!outcome.leaves"},
        {"name": "unseen", "when": "request.tools", "holds": "!outcome.shadow"},
        {"name": "whole", "holds": "!outcome.shadow || request.n == 1"},
        {"name": "first", "holds": "outcome.first != 'large'"},
        {"name": "compared", "holds": "!outcome.shadow"},
        {"name": "cached", "holds": "!outcome.cached || request.temperature == 0.0"},
    ]
    constraint = {"name": "private-stays", "keep": "on_device", "when": '"private" in request.tags'}
    policy = policy_with(
        targets=ADAPTED, routes=ROUTES, constraints=[constraint], session={"pin": "conversation"}, claims=claims
    )
    proofs = {proof.name: proof for proof in prove(policy, kinds=("claim",))}
    assert {name: proof.status for name, proof in proofs.items()} == {
        "stays": "proved",
        "unseen": "proved",
        "whole": "proved",
        "first": "refuted",
        "compared": "refuted",
        "cached": "proved",
    }
    assert all(is_failing(proof, policy) for proof in proofs.values() if proof.case is not None)


def test_values_that_leave_unmasked_are_found() -> None:
    rule = {"name": "mask", "action": "mask", "when": "pii.count > 0", "classes": ["email", "phone"]}
    new = policy_with(guard={"rules": [{**rule, "classes": ["phone"]}]})
    old = policy_with(guard={"rules": [rule]})
    proofs = {proof.name: proof for proof in prove(new, old, kinds=("compare",))}
    assert {name: proof.status for name, proof in proofs.items()} == {
        "leaves-no-more": "proved",
        "parts-leave-no-more": "proved",
        "masks-email": "refuted",
        "masks-phone": "proved",
    }
    assert is_failing(proofs["masks-email"], new)


def test_without_time_nothing_is_proved() -> None:
    assert {(proof.status, proof.why) for proof in prove(policy_with(), timeout_s=0.0)} == {
        ("undecided", "the time is over")
    }


def test_a_counterexample_is_short() -> None:
    (proof,) = prove(policy_with(claims=[{"name": "own", "holds": "!outcome.handoff"}]), kinds=("claim",))
    assert yaml.safe_load(case_text(proof)) == [
        {"name": "counterexample of own", "request": {"prompt_tokens": 0}, "expect": {"holds": "!outcome.handoff"}}
    ]


def test_a_hundred_drawn_policies() -> None:
    """At most 2 % of the statements are undecided, and each counterexample fails when it is run."""
    proofs = []
    for _, policy in itertools.islice(drawn(9, depth=1), 100):
        for proof in prove(policy, kinds=("keep",)):
            proofs.append(proof)
            assert proof.case is None or is_failing(proof, policy), msgspec.to_builtins(proof)
    assert len(proofs) > 100
    assert sum(proof.status == "undecided" for proof in proofs) <= 0.02 * len(proofs)


def test_models_that_are_no_requests_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver may have more of them than are tried."""

    def unreal(_: Witness) -> None:
        raise Excluded(z3.BoolVal(True))

    monkeypatch.setattr(Witness, "setting", unreal)
    policy = policy_with(claims=[{"name": "never", "holds": "!request.stream"}])
    (proof,) = prove(policy, kinds=("claim",))
    assert (proof.status, proof.why) == ("undecided", "the first 20 answers of the solver are no requests")


def test_statements_beyond_the_time_of_all_are_undecided() -> None:
    assert {proof.status for proof in prove(policy_with(), all_s=0.0)} == {"undecided"}
