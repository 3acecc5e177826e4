"""Root joins, imports and leaves for a daemon that runs as another account, which may have laid links."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from causeway_server.edge_node.agent.link.identity import as_owner, write_identity
from tests.edge_node.agent.fleet import Publisher

from .test_import import identity_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="root alone can work for another account")]
ROOT = Path(__file__).parents[3]
ACCOUNT = 54321
UNREACHABLE = "http://127.0.0.1:9"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The state folder of another account, below a folder that it cannot enter, as systemd keeps them."""
    state = tmp_path / "private" / "causeway"
    state.mkdir(parents=True)
    state.parent.chmod(0o700)
    os.chown(state, ACCOUNT, ACCOUNT)
    return state


@pytest.fixture
def roots(tmp_path: Path) -> Path:
    """A folder of root's, with a file that the daemon's account must not get."""
    roots = tmp_path / "roots"
    roots.mkdir()
    (roots / "shadow").write_text("secret")
    (roots / "shadow").chmod(0o600)
    return roots


def fleet(state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "causeway_server.edge_node", "fleet", *arguments, "--state-dir", str(state)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, env=environ, input="cwjoin_token", capture_output=True, text=True, timeout=120, check=False
    )


def assert_untouched(roots: Path) -> None:
    assert {path.name for path in roots.iterdir()} == {"shadow"}
    assert (roots / "shadow").read_text() == "secret"
    assert {path.stat().st_uid for path in (roots, *roots.iterdir())} == {0}


def test_join_makes_the_key_for_the_account(state: Path) -> None:
    joined = fleet(state, "join", UNREACHABLE)
    assert joined.returncode == 3, joined.stderr  # The control plane is away; the key is kept for the next try.
    keys = [path for path in (state / "fleet").iterdir() if path.is_file()]
    assert keys
    assert {path.stat().st_uid for path in (state / "fleet", *keys)} == {ACCOUNT}
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys} == {0o600}


@pytest.mark.parametrize("command", [("join", UNREACHABLE), ("leave", "--yes"), ("import", ".")])
@pytest.mark.parametrize("link", ["fleet", "lock", "fleet/import", "fleet/import.partial", "fleet/tuf"])
def test_a_link_to_a_folder_or_file_of_roots_is_not_followed(
    state: Path, roots: Path, command: tuple[str, ...], link: str
) -> None:
    target = roots / "shadow" if link == "lock" else roots
    (state / link).parent.mkdir(exist_ok=True)
    os.chown((state / link).parent, ACCOUNT, ACCOUNT)
    (state / link).symlink_to(target)
    os.lchown(state / link, ACCOUNT, ACCOUNT)
    fleet(state, *command)
    assert_untouched(roots)


def joined(state: Path, publisher: Publisher) -> None:
    """Make the folder of a device that has joined."""
    (state / "fleet").mkdir()
    write_identity(state / "fleet", identity_of(publisher))
    for path in (state / "fleet", *(state / "fleet").iterdir()):
        os.chown(path, ACCOUNT, ACCOUNT)


@pytest.fixture
def published() -> Iterator[Publisher]:
    """A medium that every account can read, as a stick is mounted."""
    with tempfile.TemporaryDirectory(prefix="causeway-stick-") as folder:
        Path(folder).chmod(0o755)
        publisher = Publisher(Path(folder) / "fleet")
        publisher.release()
        yield publisher


def test_import_writes_for_the_account(state: Path, published: Publisher) -> None:
    joined(state, published)
    imported = fleet(state, "import", str(published.folder))
    assert imported.returncode == 0, imported.stderr
    assert (state / "fleet" / "import" / "wanted").exists()
    assert {path.stat().st_uid for path in state.rglob("*")} == {ACCOUNT}


@pytest.mark.parametrize("link", ["import", "import.partial", "tuf"])
def test_import_follows_no_link_to_a_folder_of_roots(state: Path, roots: Path, published: Publisher, link: str) -> None:
    joined(state, published)
    (state / "fleet" / link).symlink_to(roots)
    fleet(state, "import", str(published.folder))
    assert_untouched(roots)


def test_the_rights_are_those_of_the_account_and_come_back(state: Path, roots: Path) -> None:
    with as_owner(state) as place:
        (place / "file").write_text("written")
        with pytest.raises(PermissionError):
            (roots / "shadow").read_text()
    assert (state / "file").stat().st_uid == ACCOUNT
    assert (os.geteuid(), os.getegid()) == (0, 0)
    with pytest.raises(KeyError), as_owner(state):
        raise KeyError
    assert os.geteuid() == 0


def test_a_folder_of_roots_own_is_used_as_it_is(tmp_path: Path) -> None:
    with as_owner(tmp_path) as place:
        assert place == tmp_path
    shutil.rmtree(tmp_path / "none", ignore_errors=True)
    with as_owner(tmp_path / "none") as place:
        assert place == tmp_path / "none"
