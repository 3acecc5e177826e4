"""A release: its notes in the changelog, one version everywhere, and a checkout that is in a commit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.prepare import dist, release

from .sources import ROOT

CHANGELOG = "# Changelog\n\n## [9.8.7] - 2026-12-01\n\n### The device\n\n- New.\n\n## [0.1.0] - 2026-11-30\n\n- Old.\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with the files that name the version 9.8.7, and its changelog."""
    files = {str(path.relative_to(ROOT)): path.read_bytes() for path in dist.version_files(ROOT)}
    dist.write_tree(tmp_path, files | {"CHANGELOG.md": CHANGELOG.encode()}, 0)
    dist.set_version(tmp_path, "9.8.7")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "a release")
    return tmp_path


def git(root: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@example.com", *words], cwd=root, check=True)


def test_the_tag_has_the_notes_of_its_version_alone(checkout: Path) -> None:
    assert release.check(checkout, "9.8.7") == "Causeway 9.8.7\n\n### The device\n\n- New.\n"


def test_a_version_that_the_files_do_not_have_is_refused(checkout: Path) -> None:
    with pytest.raises(SystemExit, match=r"have the version 9\.8\.7: run python -m tests\.prepare\.dist --version 1\."):
        release.check(checkout, "1.0.0")


@pytest.mark.parametrize("version", ["", "v9.8.7", "9.8", "aarch64"])
def test_what_is_not_a_version_is_refused(checkout: Path, version: str) -> None:
    with pytest.raises(SystemExit, match=r"is not a version: make release VERSION=0\.1\.0"):
        release.check(checkout, version)


def test_a_tag_without_an_author_is_refused_before_the_tests(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL", "EMAIL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, os.devnull)
    git(checkout, "config", "user.useConfigOnly", "true")
    with pytest.raises(SystemExit, match=r"git config user\.name NAME"):
        release.require_tagger(checkout)
    git(checkout, "config", "user.name", "a")
    git(checkout, "config", "user.email", "a@example.com")
    release.require_tagger(checkout)


def test_the_tests_do_not_get_the_words_for_the_wheels() -> None:
    """make gives its own ARGS to the makes that it starts."""
    build, install, test = release.steps("aarch64")
    assert (build[1], install[1], test[1]) == ("ARGS=--check aarch64", "ARGS=aarch64", "ARGS=")
    assert release.steps("")[0] == ["dist", "ARGS=--check"]


def test_a_checkout_with_changes_is_refused(checkout: Path) -> None:
    (checkout / "new.py").write_text("")
    with pytest.raises(SystemExit, match="in no commit"):
        release.check(checkout, "9.8.7")


def test_a_release_is_made_once(checkout: Path) -> None:
    git(checkout, "tag", "v9.8.7")
    with pytest.raises(SystemExit, match=r"The tag v9\.8\.7 exists"):
        release.check(checkout, "9.8.7")


def test_the_tested_commit_is_tagged_or_none(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("NAME", "a"), ("EMAIL", "a@example.com")):
        monkeypatch.setenv(f"GIT_COMMITTER_{name}", value)
    tested = release.head(checkout)
    git(checkout, "commit", "-q", "--allow-empty", "-m", "during the tests")
    with pytest.raises(SystemExit, match=f"moved from {tested} to .*: nothing is tagged"):
        release.tag(checkout, "9.8.7", tested)
    git(checkout, "reset", "-q", "--hard", tested)
    release.tag(checkout, "9.8.7", tested)
    with pytest.raises(SystemExit, match=r"The tag v9\.8\.7 exists"):
        release.tag(checkout, "9.8.7", tested)


@pytest.mark.parametrize(
    ("changelog", "fault"),
    [
        (CHANGELOG.replace("[9.8.7]", "[9.8.8]"), r"no section \[9\.8\.7\]"),
        (CHANGELOG.replace("2026-12-01", "unreleased"), "dates .* 'unreleased'"),
        (CHANGELOG.replace("- New.\n", "- New.\n" * 60), "has 62 lines"),
    ],
)
def test_notes_that_are_missing_undated_or_long_are_refused(changelog: str, fault: str) -> None:
    with pytest.raises(SystemExit, match=fault):
        release.notes(changelog, "9.8.7")
