"""The dashboards and alert rules as tests read them, and the real promtool and Prometheus."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from tests.prepare.programs import PROMETHEUS

ROOT = Path(__file__).parents[3]
DASHBOARDS = sorted(ROOT.glob("*/deploy/monitoring/*.json"))
RULES = sorted(ROOT.glob("*/deploy/monitoring/alerts.yaml"))
PAGE = ROOT / "cloud_pool" / "deploy" / "monitoring" / "README.md"
SERIES = re.compile(r"\b(?:causeway|gen_ai_server|gen_ai_client)_[a-z_]+")
_VARIABLES = {"$__rate_interval": "30s", "$__range": "1m"}


class Query(msgspec.Struct, frozen=True):
    """A query of a panel. `expression`: as Prometheus takes it, for all values of the dashboard's variables."""

    dashboard: str
    panel: str
    expression: str


class Alert(msgspec.Struct, frozen=True):
    name: str
    expression: str
    labels: dict[str, str]
    summary: str
    file: Path


def prometheus() -> str:
    """Return the path of the program, whose package also has promtool; skip if $CAUSEWAY_SKIP names prometheus."""
    if "prometheus" in os.environ.get("CAUSEWAY_SKIP", "").replace(",", " ").split():
        pytest.skip("CAUSEWAY_SKIP names prometheus")
    program = PROMETHEUS.find()
    assert program is not None, "Prometheus is not installed: apt-get install prometheus"
    return program


def promtool() -> Path:
    return Path(prometheus()).with_name("promtool")


def queries(dashboard: Path) -> Iterator[Query]:
    """Yield the queries of a dashboard's panels."""
    document: dict[str, Any] = json.loads(dashboard.read_text())
    names = [variable["name"] for variable in document["templating"]["list"]]
    for panel in document["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in {**_VARIABLES, **{f"${name}": ".*" for name in names}}.items():
                expression = expression.replace(name, value)
            yield Query(document["title"], panel["title"], expression)


def alerts() -> list[Alert]:
    return [
        Alert(rule["alert"], rule["expr"], rule["labels"], rule["annotations"]["summary"], path)
        for path in RULES
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ]
