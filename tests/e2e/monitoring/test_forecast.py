"""The forecast's rules, by the real promtool: ahead of a step that a week ago had, silent without a season."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from .files import ROOT, promtool

pytestmark = pytest.mark.slow
RULES = ROOT / "cloud_pool" / "deploy" / "monitoring" / "forecast.yaml"
SERIES = 'causeway_gateway_requests_running{tier="large",instance="a"}'
# A day in steps of five minutes: 100 sequences, from 8:00 to 18:00 400.
DAY = "100x95 400x119 100x71 "
LATE_DAY = "100x179 400x107 "  # from 15:00 on
WEEK = DAY * 7


@pytest.mark.parametrize(
    ("days", "at", "replicas"),
    [
        (WEEK + DAY * 2, "8d7h50m", 100 / 45),
        (WEEK + DAY * 2, "8d7h55m", 400 / 45),  # five minutes ahead
        (WEEK + DAY * 2, "8d17h50m", 400 / 45),
        (WEEK + (DAY * 2).replace("100", "150").replace("400", "600"), "8d7h55m", 600 / 45),  # 1.5 times last week's
        (WEEK, "6d7h55m", 0.0),  # no week before
        (WEEK + LATE_DAY * 2, "8d7h55m", 0.0),  # last week's step does not come
    ],
    ids=["before", "ahead", "until-the-end", "grown", "first-week", "no-better"],
)
def test_replicas_are_forecast(days: str, at: str, replicas: float, tmp_path: Path) -> None:
    check = {
        "interval": "5m",
        "input_series": [{"series": SERIES, "values": days.strip()}],
        "promql_expr_test": [
            {
                "expr": "round(causeway_forecast_replicas, 0.001)",
                "eval_time": at,
                "exp_samples": [{"labels": '{tier="large"}', "value": round(replicas, 3)}],
            }
        ],
    }
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "5m", "tests": [check]}))
    found = subprocess.run([promtool(), "test", "rules", file], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
