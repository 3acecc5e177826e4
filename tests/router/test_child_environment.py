"""What a child process inherits of the daemon's environment."""

from __future__ import annotations

import pytest

from causeway_server.router.child_environment import minimal_environment

SECRETS = {
    "CAUSEWAY_CLOUDS__MAIN__KEY": "secret",
    "CAUSEWAY_REDIS": "redis://:secret@redis",
    "CAUSEWAY_JOIN_TOKEN": "secret",
    "OPENAI_API_KEY": "secret",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "HF_TOKEN": "secret",
    "HTTPS_PROXY": "http://user:secret@proxy",
    "NOTIFY_SOCKET": "/run/systemd/notify",
    "CREDENTIALS_DIRECTORY": "/run/credentials/causeway-edge",
}
NEEDED = {
    "PATH": "/usr/bin",
    "HOME": "/home/kiosk",
    "LANG": "C.UTF-8",
    "LD_LIBRARY_PATH": "/usr/local/cuda/lib64",
    "PYTHONPATH": "/opt/causeway",
    "CUDA_VISIBLE_DEVICES": "0",
    "OMP_NUM_THREADS": "2",
    "XDG_DATA_HOME": "/var/lib/models",
}


def test_a_child_gets_no_secret_and_what_it_needs() -> None:
    assert minimal_environment({**SECRETS, **NEEDED}) == NEEDED


@pytest.mark.parametrize("prefix", ["HTTPS_PROXY", "AWS_"])
def test_further_names_are_said_one_by_one(prefix: str) -> None:
    passed = minimal_environment({**SECRETS, **NEEDED}, prefix)
    assert set(passed) - set(NEEDED) == {name for name in SECRETS if name.startswith(prefix)}
