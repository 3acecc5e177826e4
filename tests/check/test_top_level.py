"""What lies where, and that nothing of the machine it was made on has crept into the repository."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from .sources import FOLDERS, PACKAGES, ROOT

TOP = {*PACKAGES, "policies", "tests", "docs", "examples", "findings", ".ci", ".github"}
FILES = {
    "pyproject.toml",
    "setup.py",
    "README.md",
    "Makefile",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "DESIGN.md",
    "LICENSE",
    "SECURITY.md",
}
# Pieced together, so that this file is no hit itself.
REGISTRIES = [
    "".join(parts) for parts in (("pypi", ".org"), ("python", "hosted.org"), ("npm", "js.org"), ("nvcr", ".io"))
]
MACHINE = ["/" + folder + "/" for folder in ("work", "root")] + ["/" + "opt/" + name for name in ("pypi", "wheels")]


def tracked() -> list[Path]:
    """Files in git, those added but not yet committed included; the test is skipped in a tree without git."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(name) for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def stray(paths: list[Path]) -> set[str]:
    """Top-level entries that do not belong there."""
    folders = {path.parts[0] for path in paths if len(path.parts) > 1}
    files = {path.name for path in paths if len(path.parts) == 1}
    return {name for name in (folders - TOP) | (files - FILES) if not (name in files and name.startswith("."))}


def give_aways(text: str) -> list[str]:
    """Hosts of package registries, and paths of the machine that something was made on, with their lines."""
    needles = re.compile(
        "|".join([*map(re.escape, REGISTRIES), *(rf"(?<![\w./-]){re.escape(path)}" for path in MACHINE)])
    )
    return [
        f"line {number}: {line.strip()[:80]}"
        for number, line in enumerate(text.splitlines(), 1)
        if needles.search(line)
    ]


def test_only_the_agreed_entries_are_at_the_top() -> None:
    """The top level holds the seven folders, the project's files, .ci and dot-files; nothing else is tracked there."""
    assert stray(tracked()) == set()


def test_a_stray_entry_is_seen() -> None:
    """A new folder, or a file that is no dot-file, is found; a dot-file passes."""
    listed = [Path("tools/a.md"), Path("setup.cfg"), Path(".gitignore"), Path(".circleci/config.yml")]
    assert stray(listed) == {"tools", "setup.cfg", ".circleci"}


def test_no_registry_and_no_machine_path_is_tracked() -> None:
    """No tracked text names a package registry's host or a path of somebody's machine."""
    found = {}
    for path in tracked():
        data = (ROOT / path).read_bytes()
        if b"\0" not in data[:4096]:
            hits = give_aways(data.decode(errors="replace"))
            if hits:
                found[str(path)] = hits
    assert found == {}


def test_a_give_away_is_seen() -> None:
    """A registry's host or a machine's path is found, a path that merely ends alike is not."""
    assert give_aways(f"index = https://{REGISTRIES[0]}/simple\nok") == [
        f"line 1: index = https://{REGISTRIES[0]}/simple"
    ]
    assert give_aways(f"see {MACHINE[0]}notes") == [f"line 1: see {MACHINE[0]}notes"]
    assert give_aways("src/framework/root/x and ./work/y") == []


def test_every_package_is_typed() -> None:
    """Each package says that it carries types (PEP 561)."""
    assert [package for package, folder in FOLDERS.items() if not (folder / "py.typed").exists()] == []
