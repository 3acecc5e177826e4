"""`make release VERSION=X`: check, test and build a release from this checkout, and tag it here. Nothing is pushed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from .dist import versions

LINES = 60  # of the changelog for one version
STEPS = ("test", "dist ARGS=--check", "dist-check")
ROOT = Path(__file__).parents[2]


def notes(changelog: str, version: str) -> str:
    """Return the section of a version. Raises SystemExit: it is missing, has no date, or is too long."""
    found = re.search(rf"^## \[{re.escape(version)}\] - (\S+)\n(.*?)(?=^## |\Z)", changelog, re.DOTALL | re.MULTILINE)
    if found is None:
        raise SystemExit(f"CHANGELOG.md has no section [{version}]: write it.")
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", found[1]):
        raise SystemExit(f"CHANGELOG.md dates [{version}] {found[1]!r}: write the day, as 2026-11-30.")
    text = found[2].strip()
    if text.count("\n") >= LINES:
        raise SystemExit(f"CHANGELOG.md has {text.count(chr(10)) + 1} lines for [{version}]: shorten it to {LINES}.")
    return text


def check(root: Path, version: str) -> str:
    """Return the text of the tag. Raises SystemExit: the checkout is not what the release shall be."""
    named = set(versions(root))
    if named != {version}:
        others = ", ".join(sorted(named - {version}))
        write = f"python -m tests.prepare.dist --version {version}"
        raise SystemExit(f"The distributions have the version {others}: run {write} and commit.")
    text = notes((root / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    if _git(root, "status", "--porcelain"):
        raise SystemExit("The checkout has files or changes that are in no commit: commit or remove them.")
    if _git(root, "tag", "--list", f"v{version}"):
        raise SystemExit(f"The tag v{version} exists: a release is never made twice. Take the next version.")
    return f"Causeway {version}\n\n{text}\n"


def tag(root: Path, version: str, commit: str) -> None:
    """Tag a commit. Raises SystemExit: it is no longer the checkout's, or as for `check`."""
    text = check(root, version)
    if (found := head(root)) != commit:
        raise SystemExit(f"The checkout moved from {commit} to {found} during the tests: nothing is tagged. Try again.")
    # Without the removal of comments: "#" begins a heading of the notes.
    subprocess.run(
        ["git", "tag", "-a", f"v{version}", "--cleanup=verbatim", "-F", "-", commit],
        cwd=root,
        input=text,
        text=True,
        check=True,
    )


def head(root: Path) -> str:
    """Return the id of the checkout's commit."""
    return _git(root, "rev-parse", "HEAD").strip()


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout


def main(version: str) -> None:
    check(ROOT, version)
    commit = head(ROOT)
    for step in STEPS:
        if subprocess.run(["make", *step.split()], cwd=ROOT, check=False).returncode:
            raise SystemExit(f"make {step} failed: nothing is tagged.")
    tag(ROOT, version, commit)  # what was tested is what is tagged
    print(f"v{version} is tagged in this checkout, dist/ has its files. To publish: git push origin v{version}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("make release VERSION=X: which version?")
    main(sys.argv[1])
