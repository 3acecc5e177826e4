"""The routing curve: what a pair of models keeps, by how much stays on the device."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner

from models.cli.commands import main
from models.evaluate.routing_curves import CurvePoint, RoutingCurve, RoutingSample, mix, weights
from models.evaluate.routing_plots import picture, points, table


def pairs() -> list[RoutingSample]:
    """Ten requests of the device's domain, of which it answers eight; ten others, of which it answers none."""
    own = [RoutingSample(n < 8, True, True, {"good": 1.0 - n / 100, "bad": n / 100, "same": 0.0}) for n in range(10)]
    return own + [RoutingSample(False, True, False, {"good": -1.0, "bad": 1.0, "same": 0.0}) for _ in range(10)]


def curve(own_share: float, name: str) -> RoutingCurve:
    return next(one for one in mix(pairs(), own_share, ["good", "bad", "same"]).curves if one.name == name)


def test_the_mix_is_made_by_weights() -> None:
    """Whatever the file holds, the device's domain makes the share that was asked for."""
    for share in (0.0, 0.3, 1.0):
        found = weights(pairs(), share)
        assert found.sum() == pytest.approx(1.0)
        assert found[:10].sum() == pytest.approx(share)
    assert weights(pairs()[:10], 0.5).sum() == pytest.approx(1.0)


def test_a_curve_goes_from_all_cloud_to_all_device() -> None:
    """Nothing on the device is the cloud's own figure; everything is the device's."""
    found = mix(pairs(), 0.5, ["good"])
    assert (found.device_right, found.cloud_right) == (pytest.approx(0.4), pytest.approx(1.0))
    for one in found.curves:
        assert (one.points[0].stay, one.points[0].kept) == (0.0, pytest.approx(1.0))
        assert (one.points[-1].stay, one.points[-1].kept) == (1.0, pytest.approx(0.4))


def test_a_good_signal_keeps_more_than_chance_and_a_bad_one_less() -> None:
    """The good order loses nothing until 40 % stay; a signal that says the same of all is chance itself."""
    assert curve(0.5, "good").kept_at(0.4) == pytest.approx(1.0)
    assert curve(0.5, "good").stay_at(1.0) == pytest.approx(0.4)
    assert curve(0.5, "random").kept_at(0.5) == pytest.approx(0.7)
    assert curve(0.5, "same").points == curve(0.5, "random").points
    areas = [curve(0.5, name).area for name in ("bad", "random", "good", "oracle")]
    assert areas == sorted(areas)
    assert areas[2] == pytest.approx(areas[3])


def test_a_device_that_knows_better_keeps_more_than_everything() -> None:
    """More than 1 is kept where the cloud is wrong and the device is not."""
    one = [RoutingSample(True, False, True, {"s": 1.0}), RoutingSample(False, True, True, {"s": 0.0})]
    assert mix(one, 1.0, ["s"]).curves[0].kept_at(0.5) == pytest.approx(2.0)


def test_a_pair_that_answers_nothing_is_no_division_by_zero() -> None:
    """Of nothing, everything is kept."""
    assert mix([RoutingSample(False, False, True, {"s": 1.0})], 0.5, ["s"]).curves[0].points[0] == CurvePoint(
        0.0, 0.0, 1.0
    )


def test_figures_are_a_table_a_file_and_a_picture() -> None:
    """The table has a line a signal, the CSV a line a point, the picture is well-formed and has a line a curve."""
    mixes = [mix(pairs(), share, ["good", "bad"]) for share in (0.5, 0.9)]
    text = table(mixes, 20)
    assert text.count("| good |") == 2
    assert "holds" in text
    assert "misses" in text
    assert len(points(mixes).splitlines()) == 1 + 2 * 4 * 101
    root = ET.fromstring(picture(mixes[0]))
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 4


def test_the_shipped_pair_is_measured_by_one_command(tmp_path: Path) -> None:
    """Real models answer a file's rows; the table, the points and the picture are written where they are asked for."""
    pytest.importorskip("llama_cpp")
    pytest.importorskip("onnxruntime")
    rows = [
        {"text": "turn off the lights", "intent": "iot_hue_lightoff"},
        {"text": "wake me up at six am", "intent": "alarm_set", "slots": [["time", "six am"]]},
        {"text": "who was isaac newton", "intent": "qa_factoid", "slots": [["person", "isaac newton"]]},
    ]
    file = tmp_path / "hwu64.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    told = ("routing", file, "--share", 0.7, "--to", tmp_path / "out", "--run", tmp_path / "run")
    first, second = (CliRunner().invoke(main, [str(word) for word in told], catch_exceptions=False) for _ in range(2))
    assert first.exit_code == second.exit_code == 0, first.output
    assert "Over 3 requests" in first.stdout
    assert first.stdout == second.stdout
    assert "has answered" in first.stderr
    assert "has answered" not in second.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"routing.md", "routing.csv", "routing.svg"}
