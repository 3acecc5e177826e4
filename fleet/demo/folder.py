"""The fleet folder of the demo: keys, trust, and three policies of one cohort, of which the last is bad."""

from __future__ import annotations

from pathlib import Path

import msgspec

OFFLINE = ("anna", "ben", "carla")
ONLINE = "server"
COHORT = "kiosks"

_FLEET = """\
version: 1
name: demo
cohorts:
  {cohort}:
    policy: policies/kiosk.yaml
    leaving: report   # so that the bad policy gets as far as a trial; by default a box refuses it before
    rollout:
      stages: {stages}
      # Short times and wide margins, so that few boxes are judged within minutes. A fleet keeps the defaults: stages
      # of 20 minutes and more, margins of 2 and 5 points.
      first_look: {first_look}
      silence: {silence}
      least: {least}
      most: {most}
      soak: {soak}
      per_site: 20
      metrics: {{errors: {errors}, degraded: 20, latency: 30}}
"""
_TRUST = """\
version: 1
root: {{keys: [{offline}], threshold: 2, expires: 365d}}
artifacts: {{keys: [{offline}], threshold: 2, expires: 90d}}
rollout: {{keys: [{online}], expires: 7d}}
snapshot: {{keys: [{online}], expires: 7d}}
timestamp: {{keys: [{online}], expires: 2d}}
"""
_POLICY = """\
version: 1
name: {name}
targets:
  small: {{at: edge, model: assistant}}
  large: {{at: cloud, model: assistant-large}}
routes:
{routes}
"""
_CASES = """\
policy: ../kiosk.yaml
cases:
  - name: a command is answered on the device
    request: {prompt_tokens: 12}
    expect: {targets: [small]}
"""
POLICIES = {
    "first": "  - {name: on-device, use: [small]}",
    "second": "  - {name: on-device, use: [small]}\ncache:\n  - {when: request.temperature == 0.0, exact: {ttl: 5s}}",
    # It passes lint and its cases, but these boxes have no cloud: every longer prompt fails.
    "bad": "  - {name: long, when: request.prompt_tokens > 16, use: [large]}\n  - {name: on-device, use: [small]}",
}
"""Routes by the policy's name, in the order in which the demo rolls them out."""


class Pace(msgspec.Struct, frozen=True):
    """The cohort's rollout keys in `fleet.yaml`; `errors` is the margin in percentage points."""

    stages: tuple[int, ...] = (25, 50, 100)
    first_look: str = "15s"
    silence: str = "40s"
    least: str = "45s"
    most: str = "75s"
    soak: str = "20s"
    errors: int = 10


def write_fleet(folder: Path, pace: Pace) -> None:
    """Write `fleet.yaml`."""
    keys = msgspec.structs.asdict(pace) | {"stages": list(pace.stages)}
    (folder / "fleet.yaml").write_text(_FLEET.format(cohort=COHORT, **keys), encoding="utf-8")


def write_folder(folder: Path, pace: Pace | None = None) -> None:
    """Write `fleet.yaml`, `trust.yaml` and the cases. The keys are made by `causeway-fleet keys new`."""
    offline = ", ".join(f"keys/{name}.pub" for name in OFFLINE)
    folder.mkdir(parents=True, exist_ok=True)
    write_fleet(folder, pace or Pace())
    files = {
        "trust.yaml": _TRUST.format(offline=offline, online=f"keys/{ONLINE}.pub"),
        "policies/cases/kiosk.yaml": _CASES,
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def write_policy(folder: Path, name: str) -> None:
    """Make one of `POLICIES` the cohort's policy."""
    text = _POLICY.format(name=name, routes=POLICIES[name])
    (folder / "policies" / "kiosk.yaml").write_text(text, encoding="utf-8")
