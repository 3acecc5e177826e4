"""The owner's key in a TPM: a credential of systemd that one TPM alone opens. `swtpm` is the TPM."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.at_rest.state_keys import CREDENTIAL, StateKeys
from tests.ports import free_port
from tests.prepare.programs import SWTPM, TPM2

_SKIPPED = {"swtpm", "tpm2"} & set(os.environ.get("CAUSEWAY_SKIP", "").replace(",", " ").split())
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(_SKIPPED), reason=f"CAUSEWAY_SKIP names {', '.join(_SKIPPED)}"),
    pytest.mark.skipif(shutil.which("systemd-creds") is None, reason="needs systemd-creds, of systemd 250"),
]
PATIENCE_S = 30.0


@contextmanager
def tpm(folder: Path) -> Iterator[str]:
    """A TPM with its state in a folder; yields its name for systemd."""
    program = SWTPM.find()
    assert program is not None, SWTPM.advice
    assert TPM2.find() is not None, TPM2.advice
    folder.mkdir(exist_ok=True)
    port, control = free_port(), free_port()
    command = [program, "socket", "--tpm2", "--tpmstate", f"dir={folder}", "--flags", "not-need-init,startup-clear"]
    command += ["--server", f"type=tcp,port={port}", "--ctrl", f"type=tcp,port={control}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ends = time.monotonic() + PATIENCE_S
    while not _listens(port):
        assert time.monotonic() < ends, "swtpm does not start"
        time.sleep(0.01)
    try:
        yield f"swtpm:host=127.0.0.1,port={port}"
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    """Whether a port is listened at, without a connection, after which a swtpm ends."""
    with suppress(OSError):
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
        return any(fields[1].endswith(f":{port:04X}") and fields[3] == "0A" for fields in map(str.split, lines))
    return False


def creds(verb: str, device: str, *files: Path) -> bool:
    """Run systemd-creds at a TPM; return whether it did what it was asked."""
    command = ["systemd-creds", verb, f"--tpm2-device={device}", f"--name={CREDENTIAL}"]
    command += ["--with-key=tpm2", "--tpm2-pcrs=7"] if verb == "encrypt" else []
    return subprocess.run([*command, *files], check=False, capture_output=True).returncode == 0


def test_a_folder_opens_at_its_own_tpm_only(tmp_path: Path) -> None:
    """Also after that was started again. With a copy of everything on the disk another TPM opens nothing."""
    folder, sealed, opened = tmp_path / "state", tmp_path / "state-key.cred", tmp_path / "credentials"
    folder.mkdir()
    opened.mkdir()
    kept = StateKeys(folder, environ={}).seal("planted-words", "answers", 1)
    with tpm(tmp_path / "own") as own:
        assert creds("encrypt", own, Path(f"{folder}.key"), sealed)
    Path(f"{folder}.key").unlink()
    environ = {"CREDENTIALS_DIRECTORY": str(opened)}
    with tpm(tmp_path / "other") as other:
        assert not creds("decrypt", other, sealed, opened / CREDENTIAL)
    (opened / CREDENTIAL).unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="encrypted with a key that is not on this device"):
        StateKeys(folder, environ=environ).check()
    with tpm(tmp_path / "own") as own:
        assert creds("decrypt", own, sealed, opened / CREDENTIAL)
    keys = StateKeys(folder, environ=environ)
    assert (keys.source, keys.open(kept, "answers", 1)) == (CREDENTIAL, b"planted-words")
