"""`causeway-edge doctor` on what turns audio and images into text, and on voices."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from causeway_server.edge_node.cli.doctor import Finding
from causeway_server.edge_node.cli.doctor.policy_and_models import check_encoders
from causeway_server.edge_node.config.schema import Config, EngineConfig
from causeway_server.models.catalog.artifact import Manifest, save_manifest
from causeway_server.models.catalog.fit import Device
from causeway_server.models.publish.add import add_voice
from causeway_server.router.bundle.settings import PartsConfig
from tests.edge_node.parts.test_audio_api import install_voices
from tests.models.parts.tiny_voice import write_voice


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "account"))
    return Config(engine=EngineConfig(model_dirs=(str(tmp_path),)))


def add_speech(root: Path, content: bytes = b"weights") -> None:
    folder = root / "speech"
    folder.mkdir()
    (folder / "model.bin").write_bytes(content)
    sha256 = hashlib.sha256(b"weights").hexdigest()
    save_manifest(Manifest("speech", "model.bin", sha256, 7, "ctranslate2", "whisper", "F16", 0, "MIT"), folder)


def test_a_device_without_the_extras_or_with_the_encoders_off_has_no_finding(config: Config) -> None:
    assert list(check_encoders(config, lambda _: False)) == []
    assert list(check_encoders(Config(parts=PartsConfig(enabled=False)), lambda _: True)) == []


def test_a_missing_and_an_altered_model_are_named_with_what_to_do(config: Config, tmp_path: Path) -> None:
    (missing,) = check_encoders(config, lambda _: True)
    assert missing.level == "warn"
    assert "causeway-models pull speech" in missing.advice
    add_speech(tmp_path)
    assert next(check_encoders(config, lambda _: True)).level == "ok"
    (tmp_path / "speech" / "model.bin").write_bytes(b"changed")
    assert next(check_encoders(config, lambda _: True)).level == "fail"


@pytest.mark.slow
def test_voices_and_what_they_need_are_named(config: Config, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    file = write_voice(tmp_path / "files", "duo", speakers={"ann": 0, "bob": 1})
    add_voice(file, tmp_path, device=Device("big", 2**40))
    programs = str(install_voices(tmp_path))

    def found(path: str = programs, has_onnxruntime: bool = True) -> list[Finding]:
        return list(check_encoders(config, lambda _: False, {"PATH": path}, lambda: has_onnxruntime))

    (well,) = found()
    assert (well.level, "2 speakers such as duo+ann" in well.found) == ("ok", True)
    mute, _ = found(path="")
    assert (mute.level, "apt install espeak-ng" in mute.advice) == ("warn", True)
    bare, _ = found(has_onnxruntime=False)
    assert (bare.level, "causeway-router[voice]" in bare.advice) == ("warn", True)
    (tmp_path / "duo" / "model.onnx").write_bytes(b"changed")
    (altered,) = found()
    assert (altered.level, "add-voice" in altered.advice) == ("fail", True)
