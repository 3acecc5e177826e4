"""`causeway-fleet replay`: the first line, exit codes, files, and what cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from causeway_server.fleet.cli.commands import main
from causeway_server.router.policy.compiled import parse_policy
from causeway_server.router.types import DecisionRecord
from tests.router.checks.recorded import ask, record_of

TARGETS = """version: 1
name: kiosk
targets:
  small: {at: edge, model: assistant, temperature: 0}
  large: {at: cloud, model: assistant-large, price: {input: 1000, output: 1000}}
"""
PRIVATE = "constraints:\n  - {name: private-stays, keep: on_device, when: '\"private\" in request.tags'}\n"
OLD = TARGETS + PRIVATE + "routes:\n  - {name: edge, use: [small, large]}\n"
CLOUD = TARGETS + PRIVATE + "routes:\n  - {name: cloud, use: [large, small]}\n"
PUBLIC = TARGETS + "routes:\n  - {name: edge, use: [small, large]}\n"


def records(count: int = 5, *, private: int = 2, first: int = 0) -> list[DecisionRecord]:
    policy = parse_policy(OLD)
    asks = [ask(tags=("private",) if number < private else ()) for number in range(count)]
    return [record_of(policy, one, number=first + number) for number, one in enumerate(asks)]


def write(path: Path, found: list[DecisionRecord]) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in found))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("old", OLD), ("cloud", CLOUD), ("public", PUBLIC)):
        (tmp_path / f"{name}.yaml").write_text(text)
    write(tmp_path / "device-1.jsonl", records())
    return tmp_path


def run(*arguments: str | Path, stdin: bytes = b"") -> Result:
    return CliRunner().invoke(
        main, ["replay", *[str(argument) for argument in arguments]], env={"COLUMNS": "300"}, input=stdin
    )


def test_the_same_policy_exits_0(folder: Path) -> None:
    result = run(folder / "old.yaml", "--over", folder / "device-1.jsonl")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == "No request that stayed on the device would leave it, of 5 requests"


def test_private_requests_that_would_leave_are_the_first_line_and_exit_1(folder: Path) -> None:
    """Here by the fallback that the constraint kept away."""
    result = run(folder / "public.yaml", "--over", folder / "device-1.jsonl")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[0] == (
        "2 requests that stayed on the device would leave it, 2 of them bound to the device before "
        "(2 may go to the cloud as a fallback), of 5 requests"
    )
    assert "bound by private-stays" in result.stdout


def test_requests_that_lose_their_answer_are_the_second_line(folder: Path) -> None:
    """They stay on the device, so the exit code is 0; without this line they were one row of a table."""
    (folder / "away.yaml").write_text(CLOUD.replace("use: [large, small]", "use: [large]"))
    write(folder / "private.jsonl", records(private=5))
    result = run(folder / "away.yaml", "--over", folder / "private.jsonl")
    assert (result.exit_code, result.stdout.splitlines()[1]) == (0, "5 requests that had an answer would get none")


def test_json_lists_every_request_that_leaves_with_its_file(folder: Path) -> None:
    write(folder / "device-2.jsonl", records(3, private=1, first=100))
    result = run(
        folder / "cloud.yaml", "--format", "json", "--over", folder / "device-1.jsonl", folder / "device-2.jsonl"
    )
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert [(one["id"], Path(one["file"]).name, one["cause"]) for one in document["leaving"]] == [
        ("d2", "device-1.jsonl", "leaves"),
        ("d3", "device-1.jsonl", "leaves"),
        ("d4", "device-1.jsonl", "leaves"),
        ("d101", "device-2.jsonl", "leaves"),
        ("d102", "device-2.jsonl", "leaves"),
    ]
    assert document["summary"].startswith("5 requests that stayed")
    (move,) = [one for one in document["report"]["moves"] if one["moved"]]
    assert (move["before"], move["after"], move["rule_after"], move["requests"]) == (
        "small (edge)", "large (cloud)", "cloud", 5,
    )  # fmt: skip


def test_an_old_policy_is_compared_with_the_new_one(folder: Path) -> None:
    arguments = ("--old", folder / "cloud.yaml", "--over", folder / "device-1.jsonl")
    assert run(folder / "cloud.yaml", *arguments).exit_code == 0
    result = run(folder / "old.yaml", *arguments)
    assert result.exit_code == 0
    assert "large (cloud)" in result.stdout


@pytest.mark.parametrize("output", ["human", "json"])
def test_the_output_is_the_same_twice(folder: Path, output: str) -> None:
    outputs = {run(folder / "cloud.yaml", "--format", output, "--over", folder).stdout_bytes for _ in range(2)}
    assert len(outputs) == 1


def test_a_folder_and_stdin_are_read(folder: Path) -> None:
    """Repeated records, as in overlapping exports, count once."""
    lines = (folder / "device-1.jsonl").read_bytes()
    result = run(folder / "old.yaml", "--over", "-", "--over", folder, stdin=lines)
    assert "of 5 requests" in result.stdout
    assert "5 records read once although repeated" in result.stdout


def test_a_bad_line_is_reported_with_its_place_and_loses_nothing_else(folder: Path) -> None:
    path = folder / "device-1.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"{not json\n" + b'{"id": "x"}\n' + b"\xff\n\n" + b"".join(lines[1:]))
    result = run(folder / "old.yaml", "--over", path)
    assert result.exit_code == 0
    assert [line.split(": ")[0] for line in result.stderr.splitlines()] == [f"{path}:{number}" for number in (2, 3, 4)]
    assert "of 5 requests" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("old.yaml",), "Missing option '--over'"),
        (("old.yaml", "--over", "missing.jsonl"), "No such file or folder"),
        (("old.yaml", "--over", "empty"), "No records (*.jsonl)"),
        (("old.yaml", "--over", "empty.jsonl"), "No decision records in"),
        (("missing.yaml", "--over", "device-1.jsonl"), "No such file"),
        (("bad.yaml", "--over", "device-1.jsonl"), "unknown key"),
    ],
)
def test_usage_errors_exit_2(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(folder)
    (folder / "empty").mkdir()
    (folder / "empty.jsonl").write_text("")
    (folder / "bad.yaml").write_text(OLD + "colour: red\n")
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_list_of_leaving_requests_is_bounded_for_people(folder: Path) -> None:
    write(folder / "device-1.jsonl", records(50, private=50))
    result = run(folder / "public.yaml", "--limit", "3", "--over", folder)
    assert "… and 47 more: --limit 0 or --format json lists all" in result.stdout
    assert "more:" not in run(folder / "public.yaml", "--limit", "0", "--over", folder).stdout
