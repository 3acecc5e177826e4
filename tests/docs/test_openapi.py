"""The OpenAPI documents say what the code serves: all paths and methods, and only errors that it sends."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cache

import anyio
import msgspec
import pytest

import causeway_server.cloud_pool.app
import causeway_server.cloud_pool.config
import causeway_server.edge_node.app
import causeway_server.edge_node.config.schema
from causeway_server.cloud_pool.accounts.identity.config import ApiKeysConfig, IdentityConfig
from causeway_server.cloud_pool.openapi import gateway_operations
from causeway_server.edge_node.openapi import edge_operations
from causeway_server.router.api.document import Operation
from causeway_server.router.api.reader import read_api
from tests.check.sources import python_files
from tests.cloud_pool.unreachable import unreachable_tier

DESCRIBED = {"edge_node": edge_operations, "cloud_pool": gateway_operations}
WORD = re.compile(r"\w+")
WORD_OR_PATH = re.compile(r"[\w-]+")
ELSEWHERE = re.compile(r"^ *(from [\w.]+ import (\([^)]*\)|.*)|class .*)$", re.MULTILINE)
HELPERS = ("edge_node/openapi.py", "cloud_pool/openapi.py", "router/api/", "router/errors.py")


def documented(operations: Iterable[Operation]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for one in operations:
        found[one.path].add(one.method)
    return found


def test_the_edge_documents_what_it_serves() -> None:
    app = causeway_server.edge_node.app.build(causeway_server.edge_node.config.schema.Config())
    served = {path: {*methods.split(", ")} for path, methods in app.paths.items()}
    assert documented(edge_operations()) == served


async def test_the_gateway_documents_what_it_serves() -> None:
    identity = IdentityConfig(api_keys=ApiKeysConfig(accept=True))
    config = causeway_server.cloud_pool.config.Config(
        tiers=(unreachable_tier(),), redis="redis://127.0.0.1:1", identity=identity
    )
    async with anyio.create_task_group() as tasks:
        app = causeway_server.cloud_pool.app.build(config, tasks)
        served = {path: {*methods.split(", ")} for path, methods in app.paths.items()}
        tasks.cancel_scope.cancel()
    await app.close()
    assert documented(gateway_operations()) == served


@pytest.mark.parametrize("package", DESCRIBED)
def test_documented_errors_are_sent(package: str) -> None:
    """The package, or a pure part below it, names each of them: to raise it, or by its code."""
    named = _words(package) | _words("router") | _words("models")
    errors = {error for operation in DESCRIBED[package]() for error in operation.errors}
    assert errors
    assert {error.__name__ for error in errors if not named & {error.__name__, error.code}} == set()


@pytest.mark.parametrize("package", DESCRIBED)
def test_each_operation_says_what_it_is(package: str) -> None:
    operations: Sequence[Operation] = DESCRIBED[package]()
    for one in operations:
        assert one.summary.endswith(".")
        assert (one.caller == "anyone") == (not any(error.status == 401 for error in one.errors)), one.path


@pytest.mark.parametrize("package", DESCRIBED)
def test_each_part_of_a_document_is_named(package: str) -> None:
    """A list of errors or parameters, a parameter, a response or a schema that no operation needs is removed."""
    text = read_api("causeway_server.router.api", "operations.yaml").joined(
        read_api(f"causeway_server.{package}", "openapi.yaml")
    )
    named = Counter(WORD_OR_PATH.findall(str(msgspec.to_builtins(text))))
    parts = {*text.errors, *text.parameters, *text.responses, *text.schemas}
    assert {name for name in parts - {"request_headers"} if named[name] < 2} == set()  # of the page's table


@cache
def _words(folder: str) -> frozenset[str]:
    """The words of a folder's code, without imports, heads of classes and what makes the documents."""
    files = [path for path in python_files(folder) if not any(part in str(path) for part in HELPERS)]
    return frozenset(word for file in files for word in WORD.findall(ELSEWHERE.sub("", file.read_text("utf-8"))))
