"""`causeway-fleet keys`, `sign` and `diff`, as the people of a fleet use them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from causeway_server.fleet.cli.commands import main
from tests.fleet.repository.fleets import edit, write_fleet

from .signed_fleet import TRUST


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_fleet(tmp_path / "fleet")
    for name in ("anna", "ben", "carla", "server"):
        assert run("keys", "new", name, "--keys", folder / "keys").exit_code == 0
    (folder / "trust.yaml").write_text(TRUST)
    return folder


def run(*arguments: str | Path, typed: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=typed, env={"COLUMNS": "300"})


def sign(folder: Path, *names: str) -> Result:
    options = [word for name in names for word in ("--key", str(folder / "keys" / f"{name}.pem"))]
    return run("sign", folder, *options)


def test_two_people_and_a_server_publish_a_fleet(folder: Path) -> None:
    first = sign(folder, "anna")
    assert first.exit_code == 0, first.output
    assert "root version 1: 1 of 2 signatures (anna); may still sign: ben, carla" in first.output
    second = sign(folder, "anna", "ben")
    assert "root version 1: published, signed by anna, ben" in second.output
    assert "artifacts version 1: published, signed by anna, ben" in second.output
    assert not (folder / "published" / "tuf" / "metadata" / "timestamp.json").exists()
    assert "Published the metadata with timestamp version 1" in sign(folder, "server").output


def test_a_key_without_a_role_signs_nothing_and_says_so(folder: Path) -> None:
    """A key that the published root names signs its own removal."""
    assert run("keys", "new", "mallory", "--keys", folder / "keys").exit_code == 0
    stranger = sign(folder, "anna", "mallory")
    assert stranger.exit_code == 1
    assert "mallory.pem: nothing was signed, because this key has no role in trust.yaml" in stranger.output
    assert "Keys with a role: anna, ben, carla, server" in stranger.output
    assert not (folder / "pending").exists()
    sign(folder, "anna", "ben")
    (folder / "trust.yaml").write_text(TRUST.replace("keys/carla.pub", "keys/mallory.pub"))
    assert sign(folder, "carla").exit_code == 0


def test_holders_change_nothing_with_a_key_that_cannot_be_read(folder: Path) -> None:
    before = (folder / "trust.yaml").read_text()
    keys = folder / "keys"
    (keys / "anna.pem").chmod(0o644)
    assert (
        run("keys", "holders", folder, keys / "anna.pub", keys / "ben.pub", "--key", keys / "anna.pem").exit_code == 1
    )
    assert (folder / "trust.yaml").read_text() == before


@pytest.mark.slow
def test_diff_says_what_would_change(folder: Path) -> None:
    assert "kiosk: serial 1\n  first bundle: policy, 1 case file, 1 model, 3 settings" in run("diff", folder).output
    sign(folder, "anna", "ben")
    assert run("diff", folder).output == "kiosk: no change\nothers: no change\n"
    edit(folder / "fleet.yaml", "engine.threads: 4", "engine.sequences: 2")
    edit(folder / "fleet.yaml", 'answer: "4"', 'answer: "four"')
    edit(folder / "fleet.yaml", "min_daemon: 0.1.0", "min_daemon: 0.2.0")
    edit(folder / "policies" / "others.yaml", "device", "on-device")
    changed = run("diff", folder)
    assert changed.exit_code == 0
    for line in (
        "kiosk: serial 2",
        "  model assistant: other golden prompts",
        "  settings.engine.sequences: unset -> 2",
        "  settings.engine.threads: 4 -> unset",
        "  min_daemon: 0.1.0 -> 0.2.0",
        "  policy changed",
        "    -  - {name: device, use: [small]}",
        "    +  - {name: on-device, use: [small]}",
    ):
        assert line in changed.output


def test_a_fleet_with_errors_is_not_signed(folder: Path) -> None:
    edit(folder / "fleet.yaml", "engine.threads", "server.threads")
    result = sign(folder, "anna", "ben")
    assert result.exit_code == 1
    assert "fleet.yaml:12:7: error: not a key that a fleet may set" in result.output
    assert not (folder / "published").exists()


def test_a_fleet_without_trust_yaml_is_told(folder: Path) -> None:
    (folder / "trust.yaml").unlink()
    result = sign(folder, "anna")
    assert result.exit_code == 1
    assert "trust.yaml: error: the file is missing. It names the keys that sign this fleet" in result.output


def test_an_uploaded_model_is_asked_for(folder: Path) -> None:
    edit(folder / "fleet.yaml", "file: models/assistant.gguf", f"sha256: {'a' * 64}\n        size_bytes: 7")
    assert f"kiosk needs the blob {'a' * 64}" in sign(folder, "anna", "ben").output


def test_an_altered_bundle_is_told_and_not_signed_again(folder: Path) -> None:
    """Somebody edited the published files by hand."""
    sign(folder, "anna", "ben")
    shutil.rmtree(folder / "published" / "tuf" / "targets")
    result = sign(folder, "anna", "ben")
    assert result.exit_code == 1
    assert "missing or altered" in result.output


def test_a_passphrase_is_asked_for(tmp_path: Path, folder: Path) -> None:
    (folder / "keys" / "anna.pem").unlink()
    (folder / "keys" / "anna.pub").unlink()
    made = run("keys", "new", "anna", "--keys", folder / "keys", "--passphrase", typed="secret\nsecret\n")
    assert made.exit_code == 0, made.output
    listed = run("keys", "list", "--keys", folder / "keys").output
    assert [line.split()[0::2] for line in listed.splitlines()] == [
        ["anna", "encrypted"],
        ["ben", "private"],
        ["carla", "private"],
        ["server", "private"],
    ]
    assert run("sign", folder, "--key", folder / "keys" / "anna.pem", typed="secret\n").exit_code == 0
    wrong = run("sign", folder, "--key", folder / "keys" / "anna.pem", typed="public\n")
    assert wrong.exit_code == 1
    assert "passphrase is wrong" in wrong.output
    (tmp_path / "secret").write_text("secret\n")
    by_file = run("sign", folder, "--key", folder / "keys" / "anna.pem", "--passphrase-file", tmp_path / "secret")
    assert by_file.exit_code == 0


def test_a_key_has_a_plain_name(tmp_path: Path) -> None:
    assert run("keys", "new", "../anna", "--keys", tmp_path).exit_code == 2
    assert run("keys", "new", "anna", "--keys", tmp_path).exit_code == 0
    assert run("keys", "new", "anna", "--keys", tmp_path).exit_code == 1


def test_a_public_key_signs_nothing_and_an_empty_folder_has_no_keys(folder: Path, tmp_path: Path) -> None:
    result = run("sign", folder, "--key", folder / "keys" / "anna.pub")
    assert (result.exit_code, "The file is the public key. Sign with anna.pem." in result.output) == (1, True)
    assert run("keys", "list", "--keys", tmp_path / "none").output == f"No keys (*.pub) in {tmp_path / 'none'}.\n"
