"""The active policy: an invalid file changes only the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from causeway_server.edge_node.storage.policies import LAST_GOOD, PolicyStore
from causeway_server.router.errors import PolicyError
from causeway_server.router.policy.compiled import Policy

from .test_cache import ManualClock

GOOD = """version: 1
name: good
targets:
  small: {at: edge, model: m}
routes:
  - name: all
    use: [small]
"""
OTHER = GOOD.replace("name: good", "name: other")
MISTAKES = {
    "no YAML": "version: [1",
    "an alias": GOOD.replace("use: [small]", "use: &a [small]") + "  - {name: b, use: *a}\n",
    "an unknown key": GOOD + "colour: red\n",
    "an unknown target": GOOD.replace("use: [small]", "use: [huge]"),
    "an unknown signal": GOOD.replace("    use:", "    when: device.mood > 1\n    use:"),
    "broken CEL": GOOD.replace("    use:", "    when: request.n >\n    use:"),
    "a wrong type": GOOD.replace("version: 1", "version: one"),
    "too large": GOOD + "#" * (256 * 1024),
    "not UTF-8": "",
}


class Callbacks:
    """Records the calls of the store's callbacks."""

    def __init__(self) -> None:
        self.activated: list[str] = []
        self.loads: list[bool] = []

    def activate(self, policy: Policy) -> None:
        self.activated.append(policy.name)


def store(path: Path, state: Path | None, callbacks: Callbacks | None = None) -> PolicyStore:
    callbacks = callbacks or Callbacks()
    return PolicyStore(
        path, state_dir=state, clock=ManualClock().clock, on_activate=callbacks.activate, on_load=callbacks.loads.append
    )


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode() if text else b"\xff\xfe")
    return path


async def test_a_changed_file_becomes_active(tmp_path: Path) -> None:
    """Polling finds the change, activates it and keeps a copy for the next start."""
    callbacks = Callbacks()
    path = write(tmp_path / "p.yaml", GOOD)
    policies = store(path, tmp_path / "state", callbacks)
    policies.load()
    await policies.poll()
    assert callbacks.activated == ["good"]
    write(path, OTHER)
    await policies.poll()
    assert policies.active.name == "other"
    assert callbacks.activated == ["good", "other"]
    assert (tmp_path / "state" / LAST_GOOD).read_text() == OTHER
    assert callbacks.loads == [True, True]


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_an_invalid_file_is_rejected_and_the_active_policy_stays(tmp_path: Path, mistake: str) -> None:
    """The report names the file; the copy in the state folder stays too."""
    callbacks = Callbacks()
    path = write(tmp_path / "p.yaml", GOOD)
    policies = store(path, tmp_path / "state", callbacks)
    policies.load()
    write(path, MISTAKES[mistake])
    await policies.poll()
    assert policies.active.name == "good"
    assert str(path) in policies.report.refused
    assert policies.report.refused_at is not None
    assert (tmp_path / "state" / LAST_GOOD).read_text() == GOOD
    assert callbacks.loads == [True, False]
    await policies.poll()
    assert callbacks.loads == [True, False], "the same invalid file is not read twice"
    write(path, OTHER)
    await policies.poll()
    assert (policies.active.name, policies.report.refused) == ("other", "")


async def test_the_report_names_file_line_and_key(tmp_path: Path) -> None:
    path = write(tmp_path / "p.yaml", GOOD)
    policies = store(path, None)
    policies.load()
    write(path, MISTAKES["an unknown key"])
    await policies.reload()
    assert f"{path}:8" in policies.report.refused
    assert "colour" in policies.report.refused


def test_a_restart_with_a_broken_file_starts_with_the_last_good_policy(tmp_path: Path) -> None:
    """A power cut after a bad roll-out: the report says that the last good policy is active."""
    path = write(tmp_path / "p.yaml", GOOD)
    store(path, tmp_path / "state").load()
    write(path, "version: [")
    again = store(path, tmp_path / "state")
    again.load()
    assert again.active.name == "good"
    assert again.report.last_good
    assert str(path) in again.report.refused


def test_without_any_good_policy_there_is_no_start(tmp_path: Path) -> None:
    """A first start with an invalid or missing file fails."""
    with pytest.raises(PolicyError, match=r"p\.yaml"):
        store(write(tmp_path / "p.yaml", "version: ["), tmp_path / "state").load()
    with pytest.raises(PolicyError, match="No such file"):
        store(tmp_path / "nowhere.yaml", tmp_path / "state").load()


async def test_a_deleted_file_is_an_invalid_file(tmp_path: Path) -> None:
    """The active policy stays."""
    path = write(tmp_path / "p.yaml", GOOD)
    policies = store(path, None)
    policies.load()
    path.unlink()
    await policies.poll()
    assert policies.active.name == "good"
    assert "No such file" in policies.report.refused


def test_a_state_directory_that_cannot_be_written_changes_only_the_report(tmp_path: Path) -> None:
    """The policy becomes active all the same."""
    (tmp_path / "state").write_text("a file")
    policies = store(write(tmp_path / "p.yaml", GOOD), tmp_path / "state")
    policies.load()
    assert policies.active.name == "good"
    assert policies.report.persist_error
