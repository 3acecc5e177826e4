"""The routing curve: exact match that a pair of models retains, by the share of requests on the device."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner

from causeway_train.calibrate.routing_curves import CurvePoint, RoutingCurve, chart
from causeway_train.cli.commands import main
from causeway_train.evaluate.routing_table import (
    RoutingSample,
    mean_retained,
    mix,
    on_device_at,
    points,
    retained_at,
    table,
    weights,
)


def samples() -> list[RoutingSample]:
    """Ten in-domain requests, of which the device answers eight correctly; ten others, of which it answers none."""
    inside = [RoutingSample(n < 8, True, True, {"good": 1.0 - n / 100, "bad": n / 100, "same": 0.0}) for n in range(10)]
    return inside + [RoutingSample(False, True, False, {"good": -1.0, "bad": 1.0, "same": 0.0}) for _ in range(10)]


def curve(domain_share: float, name: str) -> RoutingCurve:
    return next(one for one in mix(samples(), domain_share, ["good", "bad", "same"]).curves if one.name == name)


def test_weights_give_in_domain_requests_their_share() -> None:
    for share in (0.0, 0.3, 1.0):
        found = weights(samples(), share)
        assert found.sum() == pytest.approx(1.0)
        assert found[:10].sum() == pytest.approx(share)
    assert weights(samples()[:10], 0.5).sum() == pytest.approx(1.0)


def test_a_curve_runs_from_all_cloud_to_all_device() -> None:
    found = mix(samples(), 0.5, ["good"])
    assert (found.device_exact, found.cloud_exact) == (pytest.approx(0.4), pytest.approx(1.0))
    for one in found.curves:
        assert (one.points[0].on_device, one.points[0].retained) == (0.0, pytest.approx(1.0))
        assert (one.points[-1].on_device, one.points[-1].retained) == (1.0, pytest.approx(0.4))


def test_a_good_signal_retains_more_than_random_routing_and_a_bad_one_less() -> None:
    """The good order loses nothing up to 40 % on the device; a constant signal equals random routing."""
    assert retained_at(curve(0.5, "good"), 0.4) == pytest.approx(1.0)
    assert on_device_at(curve(0.5, "good"), 1.0) == pytest.approx(0.4)
    assert retained_at(curve(0.5, "random"), 0.5) == pytest.approx(0.7)
    assert curve(0.5, "same").points == curve(0.5, "random").points
    areas = [mean_retained(curve(0.5, name)) for name in ("bad", "random", "good", "oracle")]
    assert areas == sorted(areas)
    assert areas[2] == pytest.approx(areas[3])


def test_more_than_all_is_retained_where_the_device_is_better() -> None:
    pair = [RoutingSample(True, False, True, {"s": 1.0}), RoutingSample(False, True, True, {"s": 0.0})]
    assert retained_at(mix(pair, 1.0, ["s"]).curves[0], 0.5) == pytest.approx(2.0)


def test_all_is_retained_of_a_cloud_model_without_correct_answers() -> None:
    assert mix([RoutingSample(False, False, True, {"s": 1.0})], 0.5, ["s"]).curves[0].points[0] == CurvePoint(
        0.0, 0.0, 1.0
    )


def test_curves_become_a_table_a_csv_and_an_svg() -> None:
    mixes = [mix(samples(), share, ["good", "bad"]) for share in (0.5, 0.9)]
    text = table(mixes, 20)
    assert text.count("| good |") == 2
    assert "met" in text
    assert "missed" in text
    assert len(points(mixes).splitlines()) == 1 + 2 * 4 * 101
    root = ET.fromstring(chart(mixes[0].curves, mixes[0].traffic))
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 4


@pytest.mark.slow
def test_evaluate_routing_measures_the_shipped_pair(tmp_path: Path) -> None:
    """The second run reuses the answers of the first one."""
    pytest.importorskip("llama_cpp")
    pytest.importorskip("onnxruntime")
    rows = [
        {"text": "turn off the lights", "intent": "iot_hue_lightoff"},
        {"text": "wake me up at six am", "intent": "alarm_set", "slots": [["time", "six am"]]},
        {"text": "who was isaac newton", "intent": "qa_factoid", "slots": [["person", "isaac newton"]]},
    ]
    file = tmp_path / "hwu64.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    arguments = ("evaluate-routing", file, "--share", 0.7, "--to", tmp_path / "out", "--run", tmp_path / "run")
    first, second = (
        CliRunner().invoke(main, [str(word) for word in arguments], catch_exceptions=False) for _ in range(2)
    )
    assert first.exit_code == second.exit_code == 0, first.output
    assert "over 3 requests" in first.stdout
    assert first.stdout == second.stdout
    assert "has answered" in first.stderr
    assert "has answered" not in second.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"routing.md", "routing.csv", "routing.svg"}
