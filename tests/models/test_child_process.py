"""How a child of ours finds our modules, wherever its parent was started and however it was installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from causeway_server.models.child_process import child_environment, start_child

CHILD = "causeway_server.models.parts.process.child"


def status_of(environ: dict[str, str]) -> int:
    """The exit status of a child whose link is closed at once."""
    process, link = start_child(CHILD, environ)
    link.close()
    return process.wait(60)


def test_a_folder_of_our_name_in_the_working_directory_does_not_shadow_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "causeway_server").mkdir()
    (tmp_path / "causeway_server" / "__init__.py").write_text("raise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    assert status_of(child_environment()) == 0


def test_our_own_python_needs_no_path_to_the_checkout(tmp_path: Path) -> None:
    """As after `pip install -e .` into an environment that set-up did not make, where the link is missing."""
    assert status_of({**child_environment(), "PYTHONPATH": str(tmp_path / "missing")}) == 0
