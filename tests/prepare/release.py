"""`make release VERSION=X`: check, build and test a release in this checkout, and tag it here. Nothing is pushed.

With ARGS=aarch64 the release has llama.cpp's wheel for that processor, too. What needs minutes comes before the tests.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from pathlib import Path

from . import dist
from .checks import aarch64
from .places import find_places
from .progress import StepFailed

LINES = 60  # of the changelog for one version
NOTES = "notes.md"
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
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise SystemExit(f"{version!r} is not a version: make release VERSION=0.1.0")
    named = set(dist.versions(root))
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


def require_tagger(root: Path) -> None:
    """Check that git knows the name and address of the tag's author. Raises SystemExit."""
    if subprocess.run(["git", "var", "GIT_COMMITTER_IDENT"], cwd=root, capture_output=True, check=False).returncode:
        raise SystemExit("git does not know who makes the tag: git config user.name NAME, and user.email ADDRESS.")


def steps(machine: str) -> list[list[str]]:
    """Return make's words for each step. ARGS is given to all: make passes its own ARGS on to the makes below it."""
    return [["dist", f"ARGS=--check {machine}".rstrip()], ["dist-check", f"ARGS={machine}"], ["test", "ARGS="]]


def main(version: str, machine: str) -> None:
    text = check(ROOT, version)
    require_tagger(ROOT)
    if machine:  # all questions before the first step
        aarch64.require_host()
        dist.ask(find_places(os.environ), machine)
        aarch64.ask(find_places(os.environ))
    commit = head(ROOT)
    for step in steps(machine):
        if subprocess.run(["make", *step], cwd=ROOT, env={**os.environ, "YES": "1"}, check=False).returncode:
            raise SystemExit(f"make {step[0]} failed: nothing is tagged.")
    tag(ROOT, version, commit)  # what was tested is what is tagged
    (ROOT / "dist" / NOTES).write_text(text.partition("\n\n")[2], encoding="utf-8")
    print(f"v{version} is tagged in this checkout. dist/ has:")
    print(*(f"  {path.name}" for path in sorted((ROOT / "dist").iterdir())), sep="\n")
    print(f"To publish: git push origin v{version}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="release", description="Makes a release of this checkout.")
    parser.add_argument("version")
    parser.add_argument("machine", nargs="?", choices=[aarch64.MACHINE])
    args = parser.parse_args()
    try:
        main(args.version, args.machine or "")
    except StepFailed as fault:
        raise SystemExit("\n".join(filter(None, (fault.fault, fault.tail, fault.advice)))) from fault
