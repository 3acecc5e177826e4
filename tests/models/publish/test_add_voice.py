"""`causeway-models add-voice`: a Piper voice is tried in a child; what is none is refused, and nothing is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

pytest.importorskip("onnxruntime")

from causeway_server.models.catalog.artifact import ArtifactError, find_artifact, verify_artifact
from causeway_server.models.catalog.fit import Device
from causeway_server.models.cli.commands import main
from causeway_server.models.parts.voices import LICENCE, SETTINGS, find_voice, list_voices
from causeway_server.models.publish.add import add_voice
from causeway_train.onnx_writer import UINT8, Node, Port, write_onnx
from tests.models.parts.tiny_voice import IDS, settings, write_voice

pytestmark = pytest.mark.slow
BIG = Device("big", 2**40)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "account"))
    return tmp_path / "voices"


def test_a_voice_is_added_listed_verified_and_counted(tmp_path: Path, root: Path) -> None:
    file = write_voice(tmp_path, "en_US-tiny-low", speakers={"ann": 0, "bob": 1})
    (tmp_path / "LICENSE").write_text("You may.")
    added = run("add-voice", file, "--to", root, "--licence", "CC-BY-4.0", "--licence-file", tmp_path / "LICENSE")
    assert added.exit_code == 0, added.output
    assert "added en_us-tiny-low" in added.output.replace("\n", " ")
    artifact = find_artifact("en_us-tiny-low", (root,))
    verify_artifact(artifact)
    assert (artifact.manifest.licence, artifact.manifest.architecture) == ("CC-BY-4.0", "piper")
    assert (artifact.folder / LICENCE).read_text() == "You may."
    voice = find_voice("en_us-tiny-low", (root,))
    assert voice is not None
    assert voice.settings.speakers == {"ann": 0, "bob": 1}
    assert [one.name for one in list_voices((root,))] == ["en_us-tiny-low"]
    assert "voice" in run("list", "--models", root).output
    assert "ok" in run("verify", "en_us-tiny-low", "--models", root).output
    fits = run("fit", "en_us-tiny-low", "--models", root).output
    assert "a Piper voice: its process needs 512.0 MiB" in fits
    assert "the device's own voice" in run("add-voice", file, "--to", root, "--name", "auto").output
    again = run("add-voice", file, "--to", root)
    assert again.exit_code == 1
    assert "exists already" in again.output


def test_a_voice_without_a_licence_is_added_with_a_remark(tmp_path: Path, root: Path) -> None:
    file = write_voice(tmp_path)
    added = run("add-voice", file, "--to", root, "--name", "ann", "--link")
    assert added.exit_code == 0, added.output
    assert "no licence was named" in added.output
    assert find_artifact("ann", (root,)).path.stat().st_nlink == 2


def _without(name: str) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        said = settings()
        del said[name]
        json_of(file).write_bytes(msgspec.json.encode(said))

    return change


def _with(**changes: Any) -> Callable[[Path], None]:
    return lambda file: void(json_of(file).write_bytes(msgspec.json.encode(settings(**changes))))


def void(_: object) -> None:
    return None


def json_of(file: Path) -> Path:
    return file.with_name(file.name + ".json")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda file: json_of(file).unlink(), "a voice has this file beside its .onnx"),
        (lambda file: void(json_of(file).write_text("{")), "not a Piper voice's .onnx.json"),
        (lambda file: void(json_of(file).write_text("[" * 100_000)), "not a Piper voice's .onnx.json"),
        (lambda file: void(json_of(file).write_bytes(bytes(2**20 + 1))), "larger than 1 MiB"),
        (_without("phoneme_id_map"), "phoneme_id_map"),
        (_with(audio={"sample_rate": 10**9}), "$.audio.sample_rate"),
        (_with(espeak={"voice": "-f /etc/passwd"}), "$.espeak.voice"),
        (_with(phoneme_type="pinyin"), "only voices with espeak's phonemes are supported"),
        (_with(phoneme_id_map={"a": [1]}), "has no '_'"),
        (_with(phoneme_id_map={**IDS, "a": [999]}), "'a' has the id 999"),
        (_with(speaker_id_map={"ann": 3}), "'ann' has the id 3"),
        (_with(inference={"length_scale": 0.0}), "$.inference.length_scale"),
        (_with(num_speakers=2), "its inputs are"),
        (lambda file: void(file.write_bytes(b"")), "ONNX Runtime cannot load the voice"),
        (lambda file: void(file.write_bytes(b"\x08\x09\x12 nonsense" * 9000)), "ONNX Runtime cannot load the voice"),
        (lambda file: void(file.write_bytes(file.read_bytes()[:-200])), "ONNX Runtime cannot load the voice"),
        (_with(inference={"length_scale": 10.0}, phoneme_id_map={**IDS, "a": [1] * 4}), ""),
    ],
)
def test_what_is_no_voice_is_refused_and_nothing_is_left(
    tmp_path: Path, root: Path, spoil: Callable[[Path], None], words: str
) -> None:
    file = write_voice(tmp_path)
    spoil(file)
    refused = run("add-voice", file, "--to", root, "--name", "bad")
    if not words:
        assert refused.exit_code == 0, refused.output
        return
    assert refused.exit_code == 1, refused.output
    said = refused.output.replace("\n", " ")
    assert said.startswith(f"Error: {file}")
    assert words in said
    assert not (root / "bad").exists()


def test_a_voice_that_cannot_be_read_or_written_is_refused_and_nothing_is_left(tmp_path: Path, root: Path) -> None:
    """A licence as long as a book, a folder below a file, and an .onnx that went while its settings were read."""
    file = write_voice(tmp_path)
    (tmp_path / "book").write_bytes(bytes(2**20 + 1))
    refused = run("add-voice", file, "--to", root, "--name", "ann", "--licence-file", tmp_path / "book")
    assert (refused.exit_code, "not the text of a licence" in refused.output.replace("\n", " ")) == (1, True)
    below = run("add-voice", file, "--to", tmp_path / "book" / "voices", "--name", "ann")
    assert (below.exit_code, "Not a directory" in below.output.replace("\n", " ")) == (1, True), below.output
    file.unlink()
    with pytest.raises(ArtifactError, match=f"{file}: No such file or directory"):
        add_voice(file, root, device=BIG, name="ann")
    assert not root.exists()


def test_a_model_that_is_no_voice_is_refused(tmp_path: Path, root: Path) -> None:
    file = tmp_path / "model.onnx"
    pixels, features = (Port(name, UINT8, ["images", 4, 4, 3]) for name in ("pixels", "features"))
    node = Node("Identity", ["pixels"], ["features"])
    write_onnx(file, "no voice", [node], inputs=[pixels], outputs=[features], constants={})
    json_of(file).write_bytes(msgspec.json.encode(settings()))
    refused = run("add-voice", file, "--to", root, "--name", "bad")
    assert "the file is not a Piper voice: its inputs are pixels tensor(uint8)" in refused.output.replace("\n", " ")


def test_a_voice_that_takes_too_long_or_does_not_fit_is_refused(tmp_path: Path, root: Path) -> None:
    file = write_voice(tmp_path)
    with pytest.raises(ArtifactError, match=r"cannot run the file within 512 MiB and 0\.001 s"):
        add_voice(file, root, device=BIG, name="slow", check_s=0.001)
    small = Device("small", 2**20)
    with pytest.raises(ArtifactError, match="small has 1 MiB of usable memory"):
        add_voice(file, root, device=small, name="large")
    assert not root.exists()
    assert any("512 MiB" in note for note in add_voice(file, root, device=small, name="large", force=True).notes)


def test_a_network_that_grows_without_bound_ends_with_its_child(tmp_path: Path, root: Path) -> None:
    """Its output would have 2 GB of samples."""
    file = write_voice(tmp_path, per_symbol=10_000_000)
    with pytest.raises(ArtifactError, match=r"cannot run the (?:file|voice)|not 1 to"):
        add_voice(file, root, device=BIG, name="huge")
    assert not (root / "huge").exists()


def test_an_altered_settings_file_is_named(tmp_path: Path, root: Path) -> None:
    add_voice(write_voice(tmp_path), root, device=BIG, name="ann")
    (root / "ann" / SETTINGS).write_bytes(msgspec.json.encode(settings(num_speakers=1, extra=1)))
    with pytest.raises(ArtifactError, match="altered after the voice was added"):
        find_voice("ann", (root,))
    (root / "ann" / SETTINGS).unlink()
    with pytest.raises(ArtifactError, match="add the voice again"):
        find_voice("ann", (root,))
    assert find_voice("../ann", (root,)) is None
    assert find_voice("nobody", (root,)) is None
