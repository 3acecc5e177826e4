"""The files of a new fleet: one cohort for every box, a policy that stays on the device, and its cases."""

from __future__ import annotations

from pathlib import Path

from .fleet_file import FLEET_FILE

_FLEET = """\
# The cohorts of this fleet. A box belongs to the first cohort whose labels it has; one without `match` takes every box.
version: 1
name: {name}
cohorts:
  everyone:
    policy: policies/default.yaml
    settings:             # keys of edge.yaml, by their dotted names
      log: info
    rollout:
      stages: [1, 5, 25, 50, 100]   # percent of the cohort's boxes
"""
_POLICY = """\
version: 1
name: default
targets:
  small: {at: edge, model: assistant}
  large: {at: cloud, model: assistant-large}
constraints:
  - {name: private-stays, when: '"private" in request.tags', keep: on_device}
routes:
  - {name: short, when: request.prompt_tokens < 48, use: [small, large]}
  - {name: otherwise, use: [large, small]}
"""
_CASES = """\
policy: ../default.yaml
cases:
  - name: a short prompt is answered on the device
    request: {prompt_tokens: 12}
    expect: {route: short, targets: [small, large]}
  - name: a private request never leaves
    request: {prompt_tokens: 400, tags: [private]}
    expect: {targets: [small], on_device: true}
"""
_IGNORED = """\
# Private keys stay with their holders; blobs are copied from the published folder to where the boxes fetch them.
*.pem
published/blobs/
"""


def new_fleet(folder: Path) -> tuple[Path, ...]:
    """Write the files of a new fleet and return their paths.

    Raises:
        FileExistsError: One of the files is there already; nothing was written.
        OSError: A file cannot be written.
    """
    files = {
        folder / FLEET_FILE: _FLEET.format(name=_name(folder)),
        folder / ".gitignore": _IGNORED,
        folder / "policies" / "default.yaml": _POLICY,
        folder / "policies" / "cases" / "default.yaml": _CASES,
    }
    for path in files:
        if path.exists():
            raise FileExistsError(f"{path} is there already; nothing was written")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tuple(files)


def _name(folder: Path) -> str:
    """The folder's name, as far as it is a name."""
    letters = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in folder.resolve().name)
    return letters.strip("-")[:64].strip("-") or "fleet"
