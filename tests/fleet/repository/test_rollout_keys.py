"""The rollout keys of `fleet.yaml`: what they mean, what is refused with the key and its line, small fleets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from causeway_server.fleet.repository.fleet_file import FleetDoc, RolloutDoc, maintenance_windows, rollout_settings
from causeway_server.fleet.repository.folder import check_fleet
from causeway_server.fleet.rollout.settings import RolloutSettings, RolloutStage, small_fleet_advice
from causeway_server.router.documents.reader import read_struct

from .fleets import edit, write_fleet

WRITTEN = """\
version: 1
name: stores
cohorts:
  kiosk:
    policy: policies/kiosk.yaml
    rollout:
      stages: [0.5, 10, 100]
      approval: [100]
      least: 30m
      most: 12h
      soak: 2h
      silence: 10m
      metrics: {errors: 1, latency: 2.5}
      windows:
        - {days: [fri, sat], opens: "22:00", closes: "04:30"}
        - {opens: "12:00", closes: "13:00"}
      per_site: 2
"""


def read(text: str) -> RolloutDoc:
    fleet, _, problems = read_struct(text, "fleet.yaml", FleetDoc)
    assert fleet is not None, problems
    return fleet.cohorts["kiosk"].rollout


def test_every_key_reaches_the_settings() -> None:
    doc = read(WRITTEN)
    settings = rollout_settings(doc)
    assert [(one.share, one.least_s, one.most_s, one.approval) for one in settings.stages] == [
        (500, 1800.0, 43_200.0, False),
        (10_000, 1800.0, 43_200.0, False),
        (100_000, 1800.0, 43_200.0, True),
    ]
    assert [(metric.name, metric.margin) for metric in settings.metrics] == [("errors", 0.01), ("latency", 0.025)]
    assert (settings.soak_s, settings.silence_s, settings.first_look_s) == (7200.0, 600.0, 150.0)
    night, noon = maintenance_windows(doc)
    assert (night.weekdays, night.opens, night.closes) == (frozenset({5, 6}), 1320, 270)
    assert (len(noon.weekdays), noon.opens, doc.per_site) == (7, 720, 2)


def test_without_keys_the_defaults_are_those_of_the_rollout() -> None:
    stages = tuple(RolloutStage(share) for share in (1_000, 5_000, 25_000, 50_000, 100_000))
    assert rollout_settings(RolloutDoc()) == RolloutSettings(stages)
    assert rollout_settings(RolloutDoc(least="2s", silence="1s")).metrics == RolloutSettings(stages).metrics


@pytest.mark.parametrize(
    ("keys", "key", "message"),
    [
        ("stages: [5, 1, 100]", "stages", "must grow and end with 100"),
        ("stages: [0.0001, 100]", "stages", "the smallest share is 0.001 percent"),
        ("stages: [1, 100], approval: [50]", "approval", "50 is not one of the stages 1, 100"),
        ("stages: [1, 100], approval: [1]", "approval", "1 is the first stage, which begins"),
        ("least: 2d, most: 1d", "most", "`most` must not be shorter than `least`"),
        ("least: 5m", "least", r"must be longer than silence \(15m\)"),
        ("soak: 0s", "soak", "must be above 0"),
        ("soak: 5", "soak", "is not a time such as 30s, 20m or 1d"),
        ("metrics: {error: 1}", "metrics.error", "is not one of degraded, errors, latency, did you mean `errors`"),
        ("metrics: {errors: 100}", "metrics", "must be below 100 percentage points"),
        ('windows: [{days: [monday], opens: "22:00", closes: "04:00"}]', "windows[0].days[0]", "did you mean `mon`"),
        ('windows: [{opens: "24:00", closes: "04:00"}]', "windows[0].opens", "is not a time of day such as"),
        ("windows: [{opens: 22:00, closes: 04:00}]", "windows[0].opens", "put it in quotes"),
        ("per_site: 0", "per_site", "less than 1"),
    ],
)
def test_wrong_keys_are_refused_where_they_stand(tmp_path: Path, keys: str, key: str, message: str) -> None:
    folder = write_fleet(tmp_path / "fleet")
    edit(folder / "fleet.yaml", "rollout: {stages: [1, 50, 100]}", f"rollout: {{{keys}}}")
    problems = check_fleet(folder).problems
    assert re.search(message, problems[0].message)
    assert problems[0].location.path == f"cohorts.kiosk.rollout.{key}"
    assert problems[0].location.line == 16


@pytest.mark.parametrize(("silence", "warned"), [("5m", True), ("6m", False)])
def test_a_silence_shorter_than_a_healthy_device_s_pauses_is_a_warning(
    tmp_path: Path, silence: str, *, warned: bool
) -> None:
    """Such a device would be judged lost, and shares raised past it."""
    folder = write_fleet(tmp_path / "fleet")
    edit(folder / "fleet.yaml", "rollout: {stages: [1, 50, 100]}", f"rollout: {{silence: {silence}}}")
    problems = check_fleet(folder).problems
    assert [(one.severity, one.location.path) for one in problems] == (
        [("warning", "cohorts.kiosk.rollout.silence")] if warned else []
    )


@pytest.mark.parametrize(
    ("stages", "devices", "expected"),
    [
        ((1_000, 5_000, 50_000, 100_000), 12, ["1 % and 5 % are both 1 device", "too few devices for a comparison"]),
        ((50_000, 100_000), 5_000, []),
        ((99_000, 100_000), 20, ["are both 20 devices", "99 % leaves no device to compare with"]),
        ((1_000, 100_000), 0, []),
    ],
)
def test_a_small_fleet_is_told_what_its_stages_can_show(
    stages: tuple[int, ...], devices: int, expected: list[str]
) -> None:
    advice = small_fleet_advice(RolloutSettings(tuple(RolloutStage(share) for share in stages)), devices)
    assert len(advice) == len(expected), advice
    for text, part in zip(advice, expected, strict=True):
        assert part in text
