"""A fleet of two cohorts in a folder, for tests."""

from __future__ import annotations

from pathlib import Path

FLEET = """\
version: 1
name: retail
cohorts:
  kiosk:
    match: {role: kiosk}
    policy: policies/kiosk.yaml
    models:
      assistant:
        file: models/assistant.gguf
        golden: [{prompt: "2+2?", answer: "4"}]
    settings:
      engine.threads: 4
      cloud.timeout_s: 30s
      cache.memory_bytes: 64MiB
    min_daemon: 0.1.0
    rollout: {stages: [1, 50, 100]}
  others:
    policy: policies/others.yaml
"""
POLICY = """\
version: 1
name: {name}
targets:
  small: {{at: edge, model: assistant}}
routes:
  - {{name: device, use: [small]}}
"""
CASES = """\
policy: ../{name}.yaml
cases:
  - name: the device answers
    expect: {{route: device, targets: [small]}}
"""


def write_fleet(folder: Path) -> Path:
    (folder / "policies" / "cases").mkdir(parents=True)
    (folder / "models").mkdir()
    (folder / "fleet.yaml").write_text(FLEET)
    (folder / "models" / "assistant.gguf").write_bytes(b"GGUF and weights")
    for name in ("kiosk", "others"):
        (folder / "policies" / f"{name}.yaml").write_text(POLICY.format(name=name))
        (folder / "policies" / "cases" / f"{name}.yaml").write_text(CASES.format(name=name))
    return folder


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
