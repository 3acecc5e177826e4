"""Prices of a table are written beside the models that a file names; nothing else of it changes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from causeway_server.cloud_pool.config import Config
from causeway_server.router.documents.reader import read_struct
from causeway_server.router.errors import ConfigError
from causeway_server.router.migrate.prices import with_prices

TABLE = "table 7"
POLICY = """\
targets:
  a: {at: cloud, model: m, price: {of: "v/one"}, timeout: 4s}  # ours
  b:
    price:  # dear
      of: v/two  # of the vendor
      output: 9
      table: table 6
  c: {price: {input: 3}}
"""
POLICY_NOW = """\
targets:
  a: {at: cloud, model: m, price: {of: "v/one", table: table 7, input: 0.15, output: 0.6}, timeout: 4s}  # ours
  b:
    price:  # dear
      of: v/two  # of the vendor
      input: 1
      output: 2
      table: table 7
  c: {price: {input: 3}}
"""
GATEWAY = "tenants:\n  prices:\n  - {tier: a, of: v/two}\n  - of: v/one\n    tier: b\n"
GATEWAY_NOW = (
    "tenants:\n  prices:\n  - {tier: a, of: v/two, table: table 7, input: 1, output: 2}\n"
    "  - of: v/one\n    table: table 7\n    input: 0.15\n    output: 0.6\n    tier: b\n"
)


def find(model: str) -> Mapping[str, str]:
    known = {"v/one": {"input": "0.15", "output": "0.6"}, "v/two": {"input": "1", "output": "2"}}
    if model not in known:
        raise LookupError(f"No model `{model}`.")
    return known[model]


@pytest.mark.parametrize(("before", "now"), [(POLICY, POLICY_NOW), (GATEWAY, GATEWAY_NOW)], ids=["policy", "gateway"])
def test_prices_are_added_or_replaced_and_all_else_stays(before: str, now: str) -> None:
    assert with_prices(before, "file", TABLE, find).text == now
    assert with_prices(now, "file", TABLE, find).changes == ()
    assert with_prices(before.replace("\n", "\r\n"), "file", TABLE, find).text == now.replace("\n", "\r\n")


def test_a_gateway_takes_what_was_written() -> None:
    config, _, problems = read_struct(GATEWAY_NOW, "gateway.yaml", Config)
    assert problems == ()
    assert config is not None
    assert [(price.tier, price.input, price.table) for price in config.tenants.prices] == [
        ("a", 1.0, TABLE),
        ("b", 0.15, TABLE),
    ]


def test_a_model_that_the_table_lacks_is_named_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"file:1:27: targets\.a\.price\.of: No model `v/three`\."):
        with_prices("targets: {a: {price: {of: v/three}}}\n", "file", TABLE, find)


@pytest.mark.parametrize("text", ["targets: {a: {price: {of: 'v/o\n", 'targets: {a: {price: {of: "v\\x2fone"}}}\n'])
def test_a_file_that_cannot_be_rewritten_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"file:\d"):
        with_prices(text, "file", TABLE, find)
