"""`causeway-models`, and `causeway-train evaluate`, from the command line."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

pytest.importorskip("llama_cpp")

from causeway_server.models.catalog.artifact import find_artifact
from causeway_server.models.cli.commands import main as causeway_models
from causeway_train.cli.commands import main as causeway_train

ROWS = (
    {"text": "turn off the lights", "intent": "iot_hue_lightoff", "slots": []},
    {"text": "who wrote hamlet", "intent": "qa_factoid", "slots": []},
)


def call(*arguments: object) -> Result:
    group = causeway_train if arguments[0] == "evaluate" else causeway_models
    return CliRunner().invoke(group, [str(one) for one in arguments])


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder of models with a copy of the shipped assistant under another name."""
    shipped = find_artifact("assistant").folder
    shutil.copytree(shipped, tmp_path / "copy")
    manifest = tmp_path / "copy" / "manifest.json"
    content = msgspec.json.decode(manifest.read_bytes()) | {"name": "copy"}
    manifest.write_bytes(msgspec.json.encode(content))
    return tmp_path


def test_list_names_shipped_and_added_models(copy: Path) -> None:
    result = call("list", "--models", copy)
    assert result.exit_code == 0
    for name in ("assistant", "assistant-large", "copy", str(copy)):
        assert name in result.output


def test_verify_exits_with_1_for_altered_weights(copy: Path) -> None:
    assert call("verify", "copy", "--models", copy).exit_code == 0
    weights = copy / "copy" / "model.gguf"
    raw = bytearray(weights.read_bytes())
    raw[-100] ^= 4
    weights.write_bytes(raw)
    result = call("verify", "--models", copy)
    assert result.exit_code == 1
    assert "broken" in result.output
    assert "sha256" in result.output


@pytest.mark.slow
def test_add_then_list(tmp_path: Path) -> None:
    """An added file is listed; adding the same name again is refused in one line."""
    source = find_artifact("assistant").path
    added = call("add", source, "--name", "mine", "--to", tmp_path)
    assert added.exit_code == 0, added.output
    assert "mine" in call("list", "--models", tmp_path).output
    again = call("add", source, "--name", "mine", "--to", tmp_path)
    assert again.exit_code == 1
    assert again.output.startswith("Error: a model named 'mine' exists already")


@pytest.mark.slow
def test_add_with_calls_records_that_the_model_answers_with_calls(tmp_path: Path) -> None:
    source = find_artifact("assistant").path
    for name, flags in (("free", ()), ("calling", ("--calls",))):
        assert call("add", source, "--name", name, "--to", tmp_path, *flags).exit_code == 0
    assert [find_artifact(name, (tmp_path,)).manifest.answers for name in ("free", "calling")] == ["text", "calls"]


@pytest.mark.slow
def test_an_added_model_is_found_without_a_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By every command, and by the daemon, whose catalogue it is."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert call("add", find_artifact("assistant").path, "--name", "mine").exit_code == 0
    assert find_artifact("mine").folder == tmp_path / "causeway" / "models" / "mine"
    assert "mine" in call("list").output
    file = tmp_path / "mine.jsonl"
    file.write_bytes(b"\n".join(map(msgspec.json.encode, ROWS)))
    measured = call("evaluate", file, "--source", "hwu64", "--model", "mine", "--threads", 1)
    assert measured.exit_code == 0, measured.output


def test_the_parts_that_fit_prints_add_up_to_its_total() -> None:
    output = call("fit", "assistant-large").output
    *parts, total = [float(number) for number in re.findall(r"([0-9.]+)\s+MiB", output.partition("device")[0])]
    assert len(parts) == 4
    assert sum(parts) == pytest.approx(total, abs=0.3)


def test_fit_shows_the_memory_and_every_device() -> None:
    result = call("fit", "assistant-large", "--context", 512, "--batch", 2)
    assert result.exit_code == 0
    for text in ("KV cache 8.0 MiB", "orin-nano-8gb", "agx-orin-64gb", "this-machine"):
        assert text in result.output


def test_fit_counts_the_process_of_an_encoder_before_it_is_pulled() -> None:
    output = call("fit", "speech").output
    assert "MiB" in output
    assert "orin-nano-8gb" in output


@pytest.mark.slow
def test_evaluate_prints_a_table_or_json(tmp_path: Path) -> None:
    """`--source` names the label set where the file's name does not."""
    file = tmp_path / "mine.jsonl"
    file.write_bytes(b"\n".join(map(msgspec.json.encode, ROWS)))
    result = call("evaluate", file, "--source", "hwu64", "--model", "assistant", "--threads", 1, "--grammar")
    assert result.exit_code == 0, result.output
    assert "grammar on" in result.output
    assert "AUROC 1.000" in result.output
    reports = msgspec.json.decode(
        call("evaluate", file, "--source", "hwu64", "--format", "json", "--threads", 1).output
    )
    assert [report["model"] for report in reports] == ["assistant", "assistant-large"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("verify", "nothing"), "no model named 'nothing'"),
        (("fit", "nothing"), "no model named 'nothing'"),
        (("evaluate", __file__, "--model", "assistant"), "test_cli.py:1"),
    ],
)
def test_errors_are_one_line_without_a_traceback(arguments: tuple[str, ...], complaint: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 1
    assert complaint in result.output
    assert result.output.startswith("Error: ")
