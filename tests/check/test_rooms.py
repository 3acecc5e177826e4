"""Furnishing of the rooms: circles of imports, folder sizes, one name per class, and words that are out of use."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import pytest

from .sources import FOLDERS, PACKAGES, ROOT, files_below, imported_files, parse, python_files

LARGEST_FOLDER = 14  # Python files
MOST_PARAMETERS = 8  # of a constructor
IN_BOTH = {"App", "Config", "Metrics", "Permit", "Readiness", "RequestContext", "ServerConfig", "Service"}
"""Classes with the same part in device and gateway. An entry may go; none is added."""
LONG_BODY = 4  # statements
SMALL_BYTES = 200  # markers, and packages without a docstring of their own
VAGUE = {"utils", "common", "manager", "base", "helpers", "misc"}
# Words of an older vocabulary, spelled backwards so that this file is no hit itself.
OUT_OF_USE = re.compile(r"\b(" + "|".join(word[::-1] for word in (
    "yrotS", "thgilF", "dnarrE", "werC", "kseD", "elitsnruT", "srossicS", "yteruS", "gnitooF", "sehsiW"
)) + r")\b")  # fmt: skip


# Words that gave way to another one, in any kind of file; spelled backwards, too. A table of SQLite, a parameter of
# Rich and a part of an MP4 file have such a name; users say such words to their devices, and an older state has them.
_BACKWARDS = "xob sexob xoB sexoB dnuos sdnuos dnuoS erutcip serutcip erutciP"
_LOST_WORDS = "|".join(word[::-1] for word in _BACKWARDS.split())
LOST = re.compile(rf"(?<![A-Za-z-])({_LOST_WORDS})(?![a-z-])|causeway_cl" + "oud_")
NOT_LOST = re.compile(
    rf"(FROM|INTO|UPDATE|EXISTS) \w+|\b{'xob'[::-1]}=None|14496-12: a \w+|\w+ The Lost Patrol|English {'dnuos'[::-1]}"
)


def folders() -> list[Path]:
    return sorted({path.parent for package in FOLDERS for path in python_files(package)})


def crowded(sizes: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if size > LARGEST_FOLDER}


def doubled(classes: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Class names that stand in more than one place: (name, file) pairs in, names with their files out."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, file in classes:
        places[name].append(file)
    return {name: files for name, files in places.items() if len(files) > 1}


def room(path: Path) -> str:
    """Return the room that a module lies in: the folder below its package, or itself."""
    return path.relative_to(ROOT).parts[1]


def in_circles(arrows: Mapping[str, set[str]]) -> list[str]:
    """Return the rooms that import themselves through others, sorted."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            following = arrows.get(waiting.pop(), set()) - found
            found |= following
            waiting += following
        return found

    return sorted(one for one in arrows if one in reached(one))


@pytest.mark.parametrize("package", PACKAGES)
def test_rooms_do_not_import_each_other_in_a_circle(package: str) -> None:
    """Imports for type checkers and imports inside functions count."""
    arrows: dict[str, set[str]] = defaultdict(set)
    for path in python_files(package):
        for other in imported_files(path):
            if other.relative_to(ROOT).parts[0] == package and room(other) != room(path):
                arrows[room(path)].add(room(other))
    assert arrows
    found = in_circles(arrows)
    assert found == []


def test_only_composition_and_commands_know_the_whole_configuration() -> None:
    """A room's own section of the gateway's configuration is in the room."""
    config = ROOT / "cloud_pool" / "config.py"
    assert {room(path) for path in python_files("cloud_pool") if config in imported_files(path)} == {
        "app.py",
        "background.py",
        "cli",
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_do_not_import_each_other_in_a_circle(package: str) -> None:
    """Imports for type checkers and imports inside functions count."""
    arrows = {str(path): {str(other) for other in imported_files(path)} for path in python_files(package)}
    assert in_circles(arrows) == []


def many_parameters(tree: ast.Module) -> dict[str, int]:
    """Return the classes whose constructors take more than MOST_PARAMETERS, with how many."""
    constructors = {
        node.name: statement.args
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__"
    }
    counts = {
        name: len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]) - 1
        for name, arguments in constructors.items()
    }
    return {name: count for name, count in counts.items() if count > MOST_PARAMETERS}


@pytest.mark.parametrize("package", PACKAGES)
def test_constructors_take_few_parameters(package: str) -> None:
    """Values that belong together are one parameter."""
    found = {name: count for path in python_files(package) for name, count in many_parameters(parse(path)).items()}
    assert found == {}


def test_a_long_constructor_is_seen() -> None:
    source = "class A:\n    def __init__(self, a, b, c, d, e, f, g, h, *, i): ..."
    assert many_parameters(ast.parse(source)) == {"A": 9}


def test_a_circle_is_seen() -> None:
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "e": {"a"}}) == ["b", "c"]


def test_no_folder_is_crowded() -> None:
    assert crowded({str(folder.relative_to(ROOT)): len(list(folder.glob("*.py"))) for folder in folders()}) == {}


def test_a_crowded_folder_is_seen() -> None:
    assert crowded({"a": 14, "b": 15}) == {"b": 15}


@pytest.mark.parametrize("package", FOLDERS)
def test_a_class_name_stands_once_in_a_package(package: str) -> None:
    found = [
        (node.name, str(path.relative_to(ROOT)))
        for path in python_files(package)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef)
    ]
    assert found
    assert doubled(found) == {}


def test_no_file_stands_twice() -> None:
    """What two packages need, pages and data too, is in `router`."""
    places: dict[bytes, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for path in files_below(ROOT / package):
            parts = path.relative_to(ROOT).parts
            if path.is_file() and path.stat().st_size > SMALL_BYTES and "sdk" not in parts:
                places[sha256(path.read_bytes()).digest()].append("/".join(parts))
    assert [files for files in places.values() if len(files) > 1] == []


def long_bodies(tree: ast.Module) -> dict[str, str]:
    """Return the bodies of functions with at least LONG_BODY statements, docstrings apart, with their names."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            statements = [part for one in body for part in ast.walk(one) if isinstance(part, ast.stmt)]
            if len(statements) >= LONG_BODY:
                found["\n".join(map(ast.unparse, body)).replace("self._", "self.")] = node.name
    return found


def test_no_body_stands_in_two_packages() -> None:
    """What two packages need is one function in `router`."""
    places: dict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        bodies: dict[str, str] = {}
        for path in python_files(package):
            if "sdk" not in path.relative_to(ROOT).parts:
                bodies |= {body: f"{package}: {name}" for body, name in long_bodies(parse(path)).items()}
        for body, name in bodies.items():
            places[body].append(name)
    assert [names for names in places.values() if len(names) > 1] == []


def test_a_body_is_seen_without_its_docstring() -> None:
    plain = "def a(self):\n    b = self.c\n    for d in b:\n        if d:\n            print(d)\n    return b"
    told = plain.replace("def a(self):", 'async def e(self):\n    """Print."""').replace("self.c", "self._c")
    assert long_bodies(ast.parse(plain)).keys() == long_bodies(ast.parse(told)).keys() != set()


def test_few_class_names_stand_in_both_edge_and_gateway() -> None:
    """What both have is in `router`; else two names keep apart what differs."""

    def names(package: str) -> set[str]:
        trees = [parse(path) for path in python_files(package) if "sdk" not in path.relative_to(ROOT).parts]
        found = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        return {name for name in found if not name.startswith("_")}

    assert names("edge_node") & names("cloud_pool") <= IN_BOTH


def test_a_doubled_class_is_seen() -> None:
    assert doubled([("A", "x.py"), ("B", "x.py"), ("A", "y.py")]) == {"A": ["x.py", "y.py"]}


def test_names_of_modules_say_what_they_hold() -> None:
    assert [str(path) for package in FOLDERS for path in python_files(package) if path.stem in VAGUE] == []


def test_no_word_of_the_old_vocabulary_is_left() -> None:
    hits = {}
    for folder in (*PACKAGES, "policies", "tests"):
        for path in files_below(ROOT / folder):
            if path.suffix in {".py", ".md", ".yaml", ".lua"}:
                found = OUT_OF_USE.findall(path.read_text(encoding="utf-8"))
                if found:
                    hits[str(path.relative_to(ROOT))] = found
    assert hits == {}


@pytest.mark.parametrize("suffix", [".py", ".md", ".js", ".css", ".html", ".yaml", ".lua", ".service"])
def test_no_lost_word_is_left(suffix: str) -> None:
    """The glossary has the word that stands instead: a device is a device."""
    hits = {}
    paths = [
        *ROOT.glob(f"*{suffix}"),
        *(
            path
            for top in (*PACKAGES, "policies", "tests", "docs", "examples")
            for path in files_below(ROOT / top, suffix)
        ),
    ]
    assert paths
    for path in paths:
        parts = path.relative_to(ROOT).parts
        if (
            not {"_sync", "vendor"} & set(parts)
            and path.name
            not in (
                "CHANGELOG.md",
                "history.md",
                "RESULTS.md",
                "UPGRADING.md",
                "renames.py",
                "open_ended_prompts.py",  # what users may say
            )
            and not ({"migrate", "test_migrate.py"} & set(parts))
        ):
            hits[str(path.relative_to(ROOT))] = LOST.findall(NOT_LOST.sub("", path.read_text(encoding="utf-8")))
    assert {name: found for name, found in hits.items() if found} == {}


def test_a_lost_word_is_seen() -> None:
    old = "xob"[::-1]
    assert [
        bool(LOST.search(text)) for text in (old, f"a_{old}", f"{old.title()}State", f"out{old}", f"{old}-sizing")
    ] == [True, True, True, False, False]
