"""Each alert fires on its fault and is silent without it, by the real promtool."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.tables import metric_names

from .files import PAGE, ROOT, RULES, SERIES, alerts, promtool

FAULTS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("faults.yaml").read_text())
ALERTS = alerts()


def exported() -> set[str]:
    """Return the names of all series of daemon, gateway and control plane."""
    fleet = (ROOT / "fleet" / "server" / "plane.py").read_text()
    names = metric_names("edge_node") | metric_names("cloud_pool") | set(SERIES.findall(fleet))
    return {name + suffix for name in names for suffix in ("", "_total", "_bucket", "_count", "_sum")}


def unit_test(name: str, series: dict[str, str], minute: int, expected: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": key, "values": str(values)} for key, values in series.items()],
        "alert_rule_test": [{"eval_time": f"{minute}m", "alertname": name, "exp_alerts": expected}],
    }


@pytest.mark.parametrize("rules", RULES, ids=[path.parts[-4] for path in RULES])
def test_alerts_fire_on_their_faults_alone(rules: Path, tmp_path: Path) -> None:
    checks = []
    for alert in (one for one in ALERTS if one.file == rules):
        case = FAULTS[alert.name]
        expected = {"exp_labels": alert.labels | case["labels"], "exp_annotations": {"summary": case["summary"]}}
        fires = case["fires"]
        checks.append(unit_test(alert.name, case["fault"], fires, [expected]))
        if fires:
            checks.append(unit_test(alert.name, case["fault"], fires - 1, []))
        checks.append(unit_test(alert.name, case["healthy"], case.get("silent", fires), []))
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": checks}))
    subprocess.run([promtool(), "check", "rules", rules], check=True, capture_output=True)
    found = subprocess.run([promtool(), "test", "rules", file], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_an_alert_that_does_not_fire_is_seen(tmp_path: Path) -> None:
    (alert,) = [one for one in ALERTS if one.name == "DeviceHot"]
    expected = {"exp_labels": alert.labels, "exp_annotations": {}}
    check = unit_test("DeviceHot", FAULTS["DeviceHot"]["healthy"], 6, [expected])
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(alert.file)], "evaluation_interval": "1m", "tests": [check]}))
    assert subprocess.run([promtool(), "test", "rules", file], capture_output=True, check=False).returncode != 0


def test_each_alert_has_a_fault_a_row_of_the_page_and_series_that_exist() -> None:
    page, names = PAGE.read_text(), exported()
    assert len(ALERTS) == len({alert.name for alert in ALERTS})
    assert {alert.name for alert in ALERTS} == FAULTS.keys()
    for alert in ALERTS:
        assert f"`{alert.name}`" in page
        assert set(SERIES.findall(alert.expression)) <= names, alert.name
