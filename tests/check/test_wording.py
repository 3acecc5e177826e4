"""The form of docstrings and messages: STYLE of sentences."""

from __future__ import annotations

import ast
import re

import pytest

from .sources import PACKAGES, parse, python_files

FRAGMENTS = re.compile(
    r"\W*(As|Also|By|Here|How|If|It|Its|Nobody|Of|One|Raises|That|There|Those|What|When|Where|Whether|Which|Who|Whoever"
    r"|Whose)\b"
)
"""First words that hang on the name, or begin a fragment. `Whether` may begin the meaning of a property or value."""
ENTRY = re.compile(
    r"^ +\w+: ((?:As|At|By|For|From|How|In|Is|Of|That|Those|To|What|When|Where|Which|Who|With) .*)", re.MULTILINE
)
"""An entry of `Args`, `Attributes` or `Raises` that is a fragment instead of a noun phrase or a sentence."""
RIDDLES = re.compile(
    r"\banew\b|(?<!there )(?<!There )\b(?:is|are|was) no (?!longer\b|more\b|such\b|room\b|[a-z]+ one\b)"
)
_ENDS = (".", "?", "!", "…", "}", "%s", "\n")
_LOGS = {"debug", "info", "warning", "error", "exception", "critical"}

Finding = tuple[int, str]  # line, text


def error_names() -> frozenset[str]:
    """Return the names of our error classes, which are those that descend from CausewayError."""
    bases: dict[str, set[str]] = {}
    for package in ("router", "models", "edge_node", "cloud_pool", "fleet"):
        for path in python_files(package):
            for node in ast.walk(parse(path)):
                if isinstance(node, ast.ClassDef):
                    bases.setdefault(node.name, set()).update(ast.unparse(base).split(".")[-1] for base in node.bases)
    ours = {"CausewayError"}
    while more := {name for name, parents in bases.items() if parents & ours} - ours:
        ours |= more
    return frozenset(ours)


ERRORS = error_names()


def _is_property(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("property" in ast.unparse(each) for each in node.decorator_list)


def docstrings(tree: ast.Module) -> list[tuple[int, str, bool]]:
    """Return line, text and whether it documents a function, for each docstring of the module and its attributes."""
    texts: list[tuple[int, str, bool]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            is_function = not isinstance(node, ast.Module | ast.ClassDef) and not _is_property(node)
            for at, statement in enumerate(node.body):
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    text = statement.value.value
                    if isinstance(text, str):
                        texts.append((statement.lineno, text, is_function and at == 0))
    return texts


def hanging(tree: ast.Module) -> list[Finding]:
    """Return the docstrings that begin with a fragment."""
    return [
        (line, text[:80])
        for line, text, of_function in docstrings(tree)
        if (match := FRAGMENTS.match(text)) and (match[1] != "Whether" or of_function)
    ]


def riddles(tree: ast.Module) -> list[Finding]:
    return [
        (line, match[0])
        for line, text, _ in docstrings(tree)
        for match in (*RIDDLES.finditer(text), *ENTRY.finditer(text))
    ]


def _text(node: ast.expr) -> str | None:
    """Return a literal message, with `{}` for what is filled in; None if it is not a literal."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def messages(tree: ast.Module) -> list[Finding]:
    """Return the literal messages of our errors and of log lines."""
    texts: list[Finding] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            is_log = isinstance(function, ast.Attribute) and name in _LOGS and ast.unparse(function.value) == "log"
            if (is_log or name in ERRORS) and (text := _text(node.args[0])):
                texts.append((node.lineno, text))
    return texts


def is_sentence(message: str) -> bool:
    """Return whether a message begins with a capital letter or a name, and ends with a full stop."""
    return not message[0].islower() and message.endswith(_ENDS)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_docstring_hangs_on_the_name_that_it_documents(package: str) -> None:
    """Functions are documented in the imperative, classes and values by a noun phrase."""
    assert {str(path): found for path in python_files(package) if (found := hanging(parse(path)))} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_use_plain_negations(package: str) -> None:
    """`X is not a Y` and `again` instead of their older forms."""
    assert {str(path): found for path in python_files(package) if (found := riddles(parse(path)))} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_messages_are_sentences(package: str) -> None:
    found = {
        str(path): [each for each in messages(parse(path)) if not is_sentence(each[1])]
        for path in python_files(package)
    }
    assert {path: each for path, each in found.items() if each} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_module_has_one_logger_of_its_own_name(package: str) -> None:
    found = [
        str(path)
        for path in python_files(package)
        if re.search(r"^_log\b|^log = (?!logging.getLogger\(__name__\))", path.read_text(), re.MULTILINE)
    ]
    assert found == []


def test_a_fragment_a_riddle_and_a_half_sentence_are_seen() -> None:
    tree = ast.parse('''
"""A module."""
LIMIT = 3
"""Of one message."""
def f():
    """Whether it is so."""
    raise InvalidRequest(f"the limit is {LIMIT}")
def g():
    """Return what is no limit, anew."""
    log.warning("It is %d", LIMIT)
''')
    assert [line for line, _ in hanging(tree)] == [4, 6]
    assert [text for _, text in riddles(tree)] == ["is no ", "anew"]
    assert [is_sentence(text) for _, text in messages(tree)] == [False, False]
