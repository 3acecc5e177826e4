"""`causeway-edge doctor` on what turns sound and pictures into text."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from edge_node.cli.doctor.encoders import check_encoders
from edge_node.config.schema import Config, EngineConfig, ModalitiesConfig
from models.catalog.artifact import Manifest, save_manifest


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


def test_a_box_without_the_extras_or_with_the_encoders_off_has_no_finding(config: Config) -> None:
    assert list(check_encoders(config, lambda _: False)) == []
    assert list(check_encoders(Config(modalities=ModalitiesConfig(enabled=False)), lambda _: True)) == []


def test_a_missing_and_an_altered_model_are_named_with_what_to_do(config: Config, tmp_path: Path) -> None:
    missing, pictures = check_encoders(config, lambda _: True)
    assert (missing.level, pictures.level) == ("warn", "warn")
    assert "causeway-models pull pictures" in pictures.advice
    assert "causeway-models pull speech" in missing.advice
    add_speech(tmp_path)
    assert next(check_encoders(config, lambda _: True)).level == "ok"
    (tmp_path / "speech" / "model.bin").write_bytes(b"changed")
    assert next(check_encoders(config, lambda _: True)).level == "fail"
