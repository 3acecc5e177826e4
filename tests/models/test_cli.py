"""`causeway-models` as its users type it."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

pytest.importorskip("llama_cpp")

from models.catalog.artifact import find_artifact
from models.cli.commands import main

ROWS = (
    {"text": "turn off the lights", "intent": "iot_hue_lightoff", "slots": []},
    {"text": "who wrote hamlet", "intent": "qa_factoid", "slots": []},
)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder of models with one of its own: a copy of the shipped assistant under another name."""
    shipped = find_artifact("assistant").folder
    shutil.copytree(shipped, tmp_path / "copy")
    manifest = tmp_path / "copy" / "manifest.json"
    content = msgspec.json.decode(manifest.read_bytes()) | {"name": "copy"}
    manifest.write_bytes(msgspec.json.encode(content))
    return tmp_path


def test_list_names_shipped_and_own_models(copy: Path) -> None:
    """Every model that a policy can name, and where they were looked for."""
    result = call("list", "--models", copy)
    assert result.exit_code == 0
    for name in ("assistant", "assistant-large", "copy", str(copy)):
        assert name in result.output


def test_verify_tells_altered_weights_by_its_exit_code(copy: Path) -> None:
    """All is well at first; after one flipped bit the model is named and the exit code is 1."""
    assert call("verify", "copy", "--models", copy).exit_code == 0
    weights = copy / "copy" / "model.gguf"
    raw = bytearray(weights.read_bytes())
    raw[-100] ^= 4
    weights.write_bytes(raw)
    result = call("verify", "--models", copy)
    assert result.exit_code == 1
    assert "broken" in result.output
    assert "sha256" in result.output


def test_add_then_list(tmp_path: Path) -> None:
    """A file that an owner brings is listed from then on; the same name twice is refused in one line."""
    source = find_artifact("assistant").path
    added = call("add", source, "--name", "mine", "--to", tmp_path)
    assert added.exit_code == 0, added.output
    assert "mine" in call("list", "--models", tmp_path).output
    again = call("add", source, "--name", "mine", "--to", tmp_path)
    assert again.exit_code == 1
    assert again.output.startswith("Error: there is already a model named 'mine'")


def test_an_owner_can_say_that_a_model_answers_with_calls(tmp_path: Path) -> None:
    """The manifest says it from then on; without the flag an answer is any text."""
    source = find_artifact("assistant").path
    for name, flags in (("free", ()), ("calling", ("--calls",))):
        assert call("add", source, "--name", name, "--to", tmp_path, *flags).exit_code == 0
    assert [find_artifact(name, (tmp_path,)).manifest.answers for name in ("free", "calling")] == ["text", "calls"]


def test_fit_counts_for_every_device() -> None:
    """A tiny model fits everywhere; the sum and each device are told."""
    result = call("fit", "assistant-large", "--context", 512, "--batch", 2)
    assert result.exit_code == 0
    for told in ("KV cache 8.0 MiB", "orin-nano-8gb", "agx-orin-64gb", "this-machine"):
        assert told in result.output


def test_evaluate_prints_a_table_for_any_file_of_the_format(tmp_path: Path) -> None:
    """Rows in, shares out: the source can be told when the file's name does not."""
    file = tmp_path / "mine.jsonl"
    file.write_bytes(b"\n".join(map(msgspec.json.encode, ROWS)))
    result = call("evaluate", file, "--source", "hwu64", "--model", "assistant", "--threads", 1, "--grammar")
    assert result.exit_code == 0, result.output
    assert "grammar on" in result.output
    assert "AUROC 1.000" in result.output
    reports = msgspec.json.decode(call("evaluate", file, "--source", "hwu64", "--json", "--threads", 1).output)
    assert [report["model"] for report in reports] == ["assistant", "assistant-large"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("verify", "nothing"), "no model named 'nothing'"),
        (("fit", "nothing"), "no model named 'nothing'"),
        (("evaluate", __file__, "--model", "assistant"), "test_cli.py:1"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: tuple[str, ...], complaint: str) -> None:
    """No traceback: what is wrong, and where."""
    result = call(*arguments)
    assert result.exit_code == 1
    assert complaint in result.output
    assert result.output.startswith("Error: ")
