"""`causeway-fleet init`, `lint` and `test` on a fleet's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from causeway_server.fleet.cli.commands import main

from .fleets import CASES, edit, write_fleet

MODEL, FILE = "cohorts.kiosk.models.assistant", "file: models/assistant.gguf"
UPLOADED = f"sha256: {'a' * 64}\n        size_bytes: 7"
ADAPTERS, SIGNALS = f"{MODEL}.adapters", f"{MODEL}.signals"
FITTED = f"signals: {{{{{{}}: {{{{{FILE}, model_sha256: {'a' * 64}}}}}}}}}"


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    return write_fleet(tmp_path / "fleet")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], env={"COLUMNS": "300"})


def test_a_new_fleet_passes_its_own_checks(tmp_path: Path) -> None:
    folder = tmp_path / "my fleet"
    assert run("init", folder).exit_code == 0
    linted = run("lint", "--strict", folder)
    assert linted.exit_code == 0, linted.output
    assert "my-fleet, 1 cohort" in linted.output
    tested = run("test", folder)
    assert tested.exit_code == 0, tested.output
    assert "2 of 2 cases pass" in tested.output


def test_init_overwrites_nothing(fleet: Path) -> None:
    before = (fleet / "fleet.yaml").read_bytes()
    result = run("init", fleet)
    assert result.exit_code == 2
    assert "already exists; nothing was written" in result.output
    assert (fleet / "fleet.yaml").read_bytes() == before
    assert not (fleet / "policies" / "default.yaml").exists()


@pytest.mark.parametrize("path", [".", "fleet.yaml"])
def test_lint_checks_the_fleet_and_its_policies(fleet: Path, path: str) -> None:
    result = run("lint", "--strict", fleet / path)
    assert result.exit_code == 0, result.output
    assert f"{fleet / 'fleet.yaml'}: ok  retail, 2 cohorts" in result.output
    assert f"{fleet / 'policies' / 'kiosk.yaml'}: ok  kiosk@" in result.output
    assert "3 files, 0 errors, 0 warnings" in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "line", "key", "words"),
    [
        ("engine.threads: 4", "engine.thread: 4", 12, "cohorts.kiosk.settings.engine.thread", "engine.threads"),
        ("engine.threads: 4", "server.port: 4", 12, "cohorts.kiosk.settings.server.port", "not a key that a fleet"),
        ("engine.threads: 4", "cloud.url: x", 12, "cohorts.kiosk.settings.cloud.url", "not a key that a fleet"),
        ("engine.threads: 4", "engine.threads:", 12, "cohorts.kiosk.settings.engine.threads", "is empty"),
        ("engine.threads: 4", "log: 2026-01-01", 12, "cohorts.kiosk.settings.log", "is a date"),
        ("engine.threads: 4", "log: [a]", 12, "cohorts.kiosk.settings.log", "must be one value"),
        ("cloud.timeout_s: 30s", "cloud.timeout_s: soon", 13, "cohorts.kiosk.settings.cloud.timeout_s", "float"),
        ("models/assistant.gguf", "models/none.gguf", 9, "cohorts.kiosk.models.assistant.file", "does not exist"),
        ("models/assistant.gguf", "../../etc/passwd", 9, "cohorts.kiosk.models.assistant.file", "is outside"),
        ("policies/kiosk.yaml", "/etc/passwd", 6, "cohorts.kiosk.policy", "is outside"),
        ("file: models/assistant.gguf", "size_bytes: 3", 8, "cohorts.kiosk.models.assistant", "needs either `file`"),
        ("file: models/assistant.gguf", f"sha256: {'a' * 64}", 8, "cohorts.kiosk.models.assistant", "belong together"),
        ("golden:", "adapters: {n: {file: no.gguf}}\n        golden:", 10, f"{ADAPTERS}.n.file", "does not exist"),
        ("golden:", "adapters: {n: {}}\n        golden:", 10, f"{ADAPTERS}.n", "needs either `file`"),
        ("golden:", "adapters: {N: {}}\n        golden:", 10, f"{ADAPTERS}.N", "a name of a-z"),
        (
            "golden:",
            "adapters: {n: {file: models/assistant.gguf, scale: 0}}\n        golden:",
            10,
            f"{ADAPTERS}.n.scale",
            "a finite number other than 0",
        ),
        ("golden:", "projector: {file: no.gguf}\n        golden:", 10, f"{MODEL}.projector.file", "does not exist"),
        (
            "golden:",
            f"projector: {{{FILE}, encoder: {{{FILE}}}}}\n        golden:",
            10,
            f"{MODEL}.projector.encoder",
            "Projectors in ONNX are no longer read",
        ),
        (
            f"{FILE}\n        golden:",
            f"{UPLOADED}\n        projector: {{{FILE}, model_sha256: {'b' * 64}}}\n        golden:",
            11,
            f"{MODEL}.projector.model_sha256",
            "the projector was made for others",
        ),
        ("golden:", f"signals: {{pair: {{{FILE}}}}}\n        golden:", 10, f"{SIGNALS}.pair", "needs `model_sha256`"),
        ("golden:", "signals: {scope: {}}\n        golden:", 10, f"{SIGNALS}.scope", "edge.quality"),
        (
            "golden:",
            f"{FITTED.format('pair')}\n        golden:".replace(FILE, "file: no.json"),
            10,
            f"{SIGNALS}.pair.file",
            "does not exist",
        ),
        (
            f"{FILE}\n        golden:",
            f"{UPLOADED}\n        signals: {{pair: {{{FILE}, model_sha256: {'b' * 64}}}}}\n        golden:",
            11,
            f"{SIGNALS}.pair.model_sha256",
            "the signal was fitted on others",
        ),
        (
            "golden:",
            f"{FITTED.format('pair')}\n        uncalibrated: true\n        golden:",
            11,
            f"{MODEL}.uncalibrated",
            "remove one of the two",
        ),
        ("min_daemon:", "leaving: allow\n    min_daemon:", 15, "cohorts.kiosk.leaving", "report"),
        ('answer: "4"', 'answer: "4", image: a.png', 10, f"{MODEL}.golden[0].image", "lacks a `projector`"),
        ("stages: [1, 50, 100]", "stages: [1, 50]", 16, "cohorts.kiosk.rollout.stages", "end with 100"),
        ("stages: [1, 50, 100]", "stages: [50, 1, 100]", 16, "cohorts.kiosk.rollout.stages", "must grow"),
        ("stages: [1, 50, 100]", "stages: [0, 100]", 16, "cohorts.kiosk.rollout.stages[0]", "not more than 0"),
        ("match: {role: kiosk}", "match: {}", 17, "cohorts.others", "no device can reach this cohort"),
        ("min_daemon: 0.1.0", "min_daemon: latest", 15, "cohorts.kiosk.min_daemon", "a release such as"),
        ("    policy: policies/others", "    polcy: policies/others", 18, "cohorts.others.polcy", "did you mean"),
        ("    match: {", "    signals: [device.heat]\n    match: {", 5, "cohorts.kiosk.signals[0]", "unknown signal"),
        ("name: retail", "name: retail\nname: again", 3, "name", "twice"),
    ],
)
def test_a_mistake_is_told_with_file_line_and_key(
    fleet: Path, old: str, new: str, line: int, key: str, words: str
) -> None:
    edit(fleet / "fleet.yaml", old, new)
    result = run("lint", "--format", "json", fleet)
    assert result.exit_code == 1
    (problem, *_) = json.loads(result.output)["problems"]
    assert (problem["file"], problem["line"], problem["key"]) == (str(fleet / "fleet.yaml"), line, key)
    assert words in problem["message"]


def test_a_policy_of_a_cohort_is_checked_wherever_it_lies(fleet: Path) -> None:
    (fleet / "kiosk.yaml").write_text((fleet / "policies" / "kiosk.yaml").read_text().replace("edge", "egde"))
    edit(fleet / "fleet.yaml", "policies/kiosk.yaml", "kiosk.yaml")
    result = run("lint", fleet)
    assert result.exit_code == 1
    assert "`egde` is not edge, cloud" in result.output


def test_a_target_s_adapter_must_be_in_the_bundle(fleet: Path) -> None:
    """Else every device would refuse it. Of a model that the bundle does not bring nothing is known."""
    for policy in ("kiosk", "others"):
        edit(fleet / "policies" / f"{policy}.yaml", "model: assistant}", "model: assistant+night}")
    result = run("lint", fleet)
    assert result.exit_code == 1
    assert "assistant+night, but the model has no such adapter. Its adapters: none" in result.output
    assert "1 error" in result.output
    edit(fleet / "fleet.yaml", "golden:", "adapters: {night: {file: models/assistant.gguf}}\n        golden:")
    assert run("lint", fleet).exit_code == 0


HANDOFF = (
    "routes:\n  - {name: device, use: [small]",
    """  large: {at: cloud, model: large}
routes:
  - {name: device, use: [small, large], handoff: {after_tokens: 8, below: 0.5}""",
)
UNSURE = ("{name: device, use", "{name: unsure, when: edge.quality < 0.5, use: [small]}\n  - {name: device, use")


@pytest.mark.parametrize(
    ("rule", "words", "kinds"),
    [
        (HANDOFF, "route `device` compares the confidence of its first tokens (`handoff`)", ("confidence", "pair")),
        (UNSURE, "the policy compares `edge.quality`", ("edge.quality", "pair")),
    ],
    ids=["handoff", "edge.quality"],
)
def test_new_weights_that_lose_their_calibration_are_an_error(
    fleet: Path, rule: tuple[str, str], words: str, kinds: tuple[str, str]
) -> None:
    """The signals on the devices are those of the weights that they have; the cohort without a model keeps them."""
    for policy in ("kiosk", "others"):
        edit(fleet / "policies" / f"{policy}.yaml", *rule)
    result = run("lint", fleet)
    assert result.exit_code == 1
    assert f"fleet.yaml:8:7: error: {words}, but these weights come without a signal `{kinds[0]}`" in result.output
    assert "1 error" in result.output
    text = (fleet / "fleet.yaml").read_text()
    for cure in (*(FITTED.format(kind) for kind in kinds), "uncalibrated: true"):
        (fleet / "fleet.yaml").write_text(text.replace("golden:", f"{cure}\n        golden:"))
        assert run("lint", fleet).exit_code == 0, cure
    other = "edge.quality" if kinds[0] == "confidence" else "confidence"
    (fleet / "fleet.yaml").write_text(text.replace("golden:", f"{FITTED.format(other)}\n        golden:"))
    assert run("lint", fleet).exit_code == 1


def test_a_signal_that_no_device_of_a_cohort_can_read_is_a_warning(fleet: Path) -> None:
    """Two cohorts run one policy: only the devices of one have a thermometer."""
    edit(fleet / "policies" / "kiosk.yaml", "{name: device,", "{name: hot, when: device.temperature_c > 85.0,")
    edit(fleet / "fleet.yaml", "match: {role: kiosk}", "match: {role: kiosk}\n    signals: [device.temperature_c]")
    assert "no device can read" not in run("lint", fleet).output
    edit(fleet / "fleet.yaml", "policies/others.yaml", "policies/kiosk.yaml\n    signals: [edge.queue]")
    assert run("lint", fleet).output.count("no device can read device.temperature_c: the rule never holds") == 1


def test_a_policy_without_cases_is_a_warning(fleet: Path) -> None:
    (fleet / "policies" / "cases" / "others.yaml").unlink()
    result = run("lint", fleet)
    assert result.exit_code == 0
    assert "fleet.yaml:18:5: warning: no test cases" in result.output
    assert run("lint", "--strict", fleet).exit_code == 1


def test_test_runs_the_cases_of_every_policy(fleet: Path) -> None:
    result = run("test", fleet)
    assert result.exit_code == 0, result.output
    assert result.output.count("1 of 1 cases pass") == 2


def test_test_fails_with_a_case_or_with_the_fleet(fleet: Path) -> None:
    (fleet / "policies" / "cases" / "kiosk.yaml").write_text(CASES.format(name="kiosk").replace("device,", "cloud,"))
    assert run("test", fleet).exit_code == 1
    (fleet / "policies" / "cases" / "kiosk.yaml").write_text(CASES.format(name="kiosk"))
    edit(fleet / "fleet.yaml", "engine.threads", "server.threads")
    result = run("test", fleet)
    assert result.exit_code == 1
    assert "not a key that a fleet may set" in result.output


def test_cases_name_the_adapters_of_every_cohort(fleet: Path) -> None:
    """A case holds where each cohort that runs its policy has the adapter."""
    cases = fleet / "policies" / "cases" / "kiosk.yaml"
    cases.write_text(CASES.format(name="kiosk").replace("expect:", "request: {model: assistant+night}\n    expect:"))
    edit(cases, "route: device, targets: [small]", "targets: [small+night]")
    assert "model_not_found" in run("test", fleet).output
    edit(fleet / "fleet.yaml", "golden:", "adapters: {night: {file: models/assistant.gguf}}\n        golden:")
    result = run("test", fleet)
    assert result.exit_code == 0, result.output
    edit(
        fleet / "fleet.yaml",
        "policies/others.yaml",
        "policies/kiosk.yaml\n    models: {assistant: {file: models/assistant.gguf}}",
    )
    assert "model_not_found" in run("test", fleet).output


def test_a_target_with_a_missing_adapter_runs_no_case(fleet: Path) -> None:
    edit(fleet / "policies" / "kiosk.yaml", "model: assistant}", "model: assistant+night}")
    result = run("test", fleet)
    assert result.exit_code == 1
    assert result.output.count("the model has no such adapter. Its adapters: none") == 1


def test_test_without_any_case_is_a_usage_error(fleet: Path) -> None:
    for path in (fleet / "policies" / "cases").iterdir():
        path.unlink()
    assert run("test", fleet).exit_code == 2
    (fleet / "fleet.yaml").write_text("")
    empty = run("test", fleet)
    assert (empty.exit_code, "fleet.yaml:1:1: error: the file is empty" in empty.output) == (1, True)
