"""Variants of a model: shares are nested and sticky, the verdict stops a worse one and no equal one, trials persist."""

from __future__ import annotations

import random

import msgspec
import pytest

from causeway_server.router.types import Message, Request, RoutingHints, TextPart
from causeway_server.router.variants.assignment import assign, group_of, unit_of
from causeway_server.router.variants.settings import Sticky, TrialConfig, VariantConfig, VerdictMetric
from causeway_server.router.variants.trials import Trial, TrialPlace, Trials
from causeway_server.router.variants.verdict import Tally, VerdictOutcome, judge_metric
from tests.bench.simulation.variants import simulate

UNITS = [f"unit {number}" for number in range(4_000)]
V2, V3 = VariantConfig("v2", 5), VariantConfig("v3", 10)
FEEDBACK = VerdictMetric("feedback")


def assigned(*variants: VariantConfig) -> list[str]:
    return [assign("large", unit, variants, lambda one: one.share) for unit in UNITS]


# --- assignment ------------------------------------------------------------------------------------------------------


def test_a_variant_gets_its_share_of_the_units() -> None:
    assert 0.04 < assigned(V2).count("v2") / len(UNITS) < 0.06
    assert assigned(msgspec.structs.replace(V2, share=0)).count("") == len(UNITS)
    assert assigned(msgspec.structs.replace(V2, share=100)).count("v2") == len(UNITS)


def test_raising_a_share_moves_no_unit_back() -> None:
    """Nor away from the variant that it has, whichever share is raised last in the list."""
    before, after = assigned(V2, V3), assigned(V2, msgspec.structs.replace(V3, share=60))
    assert all(late == early for early, late in zip(before, after, strict=True) if early)
    after = assigned(msgspec.structs.replace(V2, share=60), V3)
    assert all(late for early, late in zip(before, after, strict=True) if early)
    assert all(late == "v2" for early, late in zip(before, after, strict=True) if early == "v2")


def test_targets_and_variants_have_orders_of_their_own() -> None:
    """The variants of a target are assigned independently of those of another one."""
    both = sum(
        bool(assign("a", unit, [V3], lambda one: 10) and assign("b", unit, [V3], lambda one: 10)) for unit in UNITS
    )
    assert both < 0.03 * len(UNITS)


def chat(*texts: str, client: str = "ann", user: str | None = None) -> Request:
    roles = ("user", "assistant") * len(texts)
    messages = tuple(Message(role, text) for role, text in zip(roles, texts, strict=False))
    return Request(kind="chat", model="auto", messages=messages, user=user, hints=RoutingHints(client=client))


@pytest.mark.parametrize(
    ("sticky", "other", "same"),
    [
        ("conversation", chat("hello", "hi", "and now?"), True),
        ("conversation", chat("good morning"), False),
        ("conversation", chat("hello", client="bob"), False),
        ("user", chat("something else"), True),
        ("user", chat("hello", user="u2"), False),
        ("user", chat("hello", client="bob"), False),
        ("device", chat("anything", client="bob"), True),
    ],
)
def test_what_stays_with_one_model(sticky: Sticky, other: Request, same: bool) -> None:
    assert (unit_of(chat("hello"), sticky, "d1") == unit_of(other, sticky, "d1")) is same


def test_at_a_gateway_the_device_is_the_client() -> None:
    assert unit_of(chat("a", client="ann"), "device", "") != unit_of(chat("a", client="bob"), "device", "")


def test_any_request_has_a_unit() -> None:
    """Parts, lone surrogates, token ids, nothing at all."""
    odd = Request(kind="chat", model="auto", messages=(Message("user", (TextPart("\ud800"),)),))
    for request in (odd, chat(), Request(kind="completion", model="auto", prompts=((1, 2),)), chat("\ud800")):
        for sticky in ("conversation", "user", "device"):
            unit = unit_of(request, sticky, "")
            assert 0 <= group_of(unit) < Tally.GROUPS
            assert assign("large", unit, [V2], lambda one: 100) == "v2"


# --- the verdict -----------------------------------------------------------------------------------------------------


def tally(bad: int, answers: int, groups: int = Tally.GROUPS) -> Tally:
    """Return answers that are spread over the groups by chance."""
    draw, found = random.Random(bad), Tally()
    for number in range(answers):
        found.add(draw.randrange(groups), float(number < bad))
    return found


@pytest.mark.parametrize(
    ("variant", "baseline", "expected"),
    [
        (tally(20, 99), tally(1000, 5000), VerdictOutcome.INCONCLUSIVE),  # too few
        (tally(200, 1000), tally(4000, 20000), VerdictOutcome.INCONCLUSIVE),
        (tally(280, 1000), tally(4000, 20000), VerdictOutcome.FAIL),
        (tally(2180, 10000), tally(40000, 200000), VerdictOutcome.INCONCLUSIVE),  # worse, within the margin
        (tally(2000, 10000), tally(40000, 200000), VerdictOutcome.PASS),
        (tally(1000, 10000), tally(40000, 200000), VerdictOutcome.PASS),
        (tally(0, 1000), tally(0, 20000), VerdictOutcome.PASS),
        (tally(1000, 1000), tally(20000, 20000), VerdictOutcome.PASS),
        (tally(100, 100), tally(0, 2000), VerdictOutcome.FAIL),
    ],
)
def test_a_metric_fails_passes_or_is_inconclusive(variant: Tally, baseline: Tally, expected: VerdictOutcome) -> None:
    assert judge_metric(variant, baseline, FEEDBACK, 100, 1).outcome is expected


def test_answers_that_come_together_count_for_less() -> None:
    """The bad answers of one user are not those of a hundred."""
    one_user = Tally()
    for group in range(40):
        one_user.add(group, 20.0 if group < 14 else 0.0, 20.0)
    spread = tally(280, 800)
    assert one_user.total == spread.total
    baseline = tally(4000, 20000)
    assert judge_metric(spread, baseline, FEEDBACK, 100, 1).outcome is VerdictOutcome.FAIL
    assert judge_metric(one_user, baseline, FEEDBACK, 100, 1).outcome is not VerdictOutcome.FAIL


def test_a_worse_variant_is_returned_and_an_equal_one_is_not() -> None:
    """A fixed small set of the simulated trials; `python -m tests.bench variants` runs 1,000 of each kind."""
    assert simulate(30, 0.05, 4_000, seed=0).share(4_000) >= 0.95
    assert simulate(2, 0.0, 10_000, seed=0).after == ()


# --- trials ----------------------------------------------------------------------------------------------------------

CONFIG = TrialConfig(metrics=(VerdictMetric("errors"), VerdictMetric("latency", over_s=2.0)), least=20)


def trials(*variants: VariantConfig, config: TrialConfig = CONFIG, decided: list[str] | None = None) -> Trials:
    found = Trials(
        decided=lambda trial: None if decided is None else decided.append(f"{trial.variant.model} {trial.state}")
    )
    found.use({"large": TrialPlace("v1", variants, config)})
    return found


def answer(found: Trials, variant: str, count: int, *, failed: int = 0, slow: int = 0) -> None:
    for number in range(count):
        duration_s = 3.0 if number < failed + slow else 1.0
        found.answered("large", variant, number % Tally.GROUPS, failed=number < failed, duration_s=duration_s)


def states(found: Trials) -> dict[str, str]:
    return {trial.variant.model: trial.state for trial in found}


@pytest.mark.parametrize(("failed", "slow"), [(200, 0), (0, 200)], ids=["errors", "latency"])
def test_a_variant_that_fails_or_hangs_is_returned_and_gets_no_more_requests(failed: int, slow: int) -> None:
    decided: list[str] = []
    found = trials(VariantConfig("v2", 100), decided=decided)
    assert found.assigned(chat("hello")) == {"large": "v2"}
    answer(found, "", 400)
    answer(found, "v2", 200, failed=failed, slow=slow)
    assert (states(found), decided) == ({"v2": "returned"}, ["v2 returned"])
    assert found.assigned(chat("hello")) == {}
    (trial,) = found
    assert "worse by more than 2.0%" in trial.reason


@pytest.mark.parametrize("promote", [False, True])
def test_a_variant_that_passes_is_promoted_if_the_owner_says_so(promote: bool) -> None:
    found = trials(VariantConfig("v2", 5), config=msgspec.structs.replace(CONFIG, promote=promote))
    answer(found, "", 2_000)
    answer(found, "v2", 2_000)
    assert states(found) == {"v2": "promoted" if promote else "running"}
    reached = sum(bool(found.assigned(chat(unit))) for unit in UNITS[:200])
    assert reached == 200 if promote else reached < 40


def test_feedback_counts_under_its_label_only() -> None:
    """A metric that the owner names is the label of feedback; other labels, and scores without one, do not count."""
    config = TrialConfig(metrics=(VerdictMetric("resolved"),), least=20)
    found = trials(VariantConfig("v2", 5), config=config)
    for group in range(Tally.GROUPS):
        for label in ("", "other"):
            found.scored("large", "v2", group, 0.0, label)
            found.scored("large", "", group, 1.0, label)
    assert states(found) == {"v2": "running"}
    for group in range(Tally.GROUPS):
        found.scored("large", "", group, 1.0, "resolved")
        found.scored("large", "v2", group, 0.0, "resolved")
    assert states(found) == {"v2": "returned"}


def test_variants_do_not_count_for_each_other() -> None:
    found = trials(VariantConfig("v2", 5), VariantConfig("v3", 5))
    answer(found, "", 400)
    answer(found, "v3", 100)
    answer(found, "v2", 200, failed=200)
    assert states(found) == {"v2": "returned", "v3": "running"}
    answer(found, "unknown", 200, failed=200)
    found.answered("elsewhere", "", 0, failed=True, duration_s=1.0)
    assert states(found)["v3"] == "running"


def test_variants_are_added_moved_and_removed_and_others_go_on() -> None:
    """A verdict stays with its model and share; a variant that was removed, or has another share, begins again."""
    found = trials(VariantConfig("v2", 5))
    answer(found, "", 400)
    answer(found, "v2", 200, failed=200)
    found.use({"large": TrialPlace("v1", (VariantConfig("v2", 5), V3), CONFIG)})
    assert states(found) == {"v2": "returned", "v3": "running"}
    found.use({"large": TrialPlace("v1", (VariantConfig("v2", 6),), CONFIG)})
    assert states(found) == {"v2": "running"}
    answer(found, "", 400)
    answer(found, "v2", 200, failed=200)
    found.use({"large": TrialPlace("v1b", (VariantConfig("v2", 6),), CONFIG)})
    assert states(found) == {"v2": "running"}
    found.use({"large": TrialPlace("v1b", (), CONFIG)})
    assert not found
    found.use({"large": TrialPlace("v1b", (VariantConfig("v2", 6),), CONFIG)})
    assert states(found) == {"v2": "running"}


def test_trials_go_on_after_a_restart() -> None:
    found = trials(VariantConfig("v2", 5))
    answer(found, "", 400)
    answer(found, "v2", 15, failed=15)
    again = trials(VariantConfig("v2", 5))
    again.restore(found.dump())
    answer(again, "v2", 200, failed=200)
    assert [trial.arms["errors"][1].total for trial in again] == [(0.0, 400.0)]
    assert states(again) == {"v2": "returned"}
    last = trials(VariantConfig("v2", 5))
    last.restore(again.dump())
    assert states(last) == {"v2": "returned"}


@pytest.mark.parametrize("data", [b"", b"\xff", b"{}", b"[1]", b'[{"place":"large"}]'])
def test_a_file_that_cannot_be_read_begins_again(data: bytes) -> None:
    found = trials(VariantConfig("v2", 5))
    found.restore(data)
    assert states(found) == {"v2": "running"}


def test_a_trial_s_counts_of_another_length_are_not_taken_over() -> None:
    record = Trial("large", "v1", V2, CONFIG).record()
    short = msgspec.structs.replace(record, counts={"errors": ([1.0], [1.0], [1.0], [1.0])})
    trial = Trial("large", "v1", V2, CONFIG)
    trial.restore(short)
    assert trial.arms["errors"][0].total == (0.0, 0.0)
