"""A real PostgreSQL for tests: a temporary cluster on a free port, run as the user `postgres` where we are root."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

import psutil
import pytest

from tests.ports import free_port
from tests.prepare.programs import POSTGRES


class PostgresServer:
    """Started at once. Each `database` is a new, empty one."""

    def __init__(self, folder: Path, binaries: Path) -> None:
        self._binaries = binaries
        self._folder = folder
        self._user = pwd.getpwnam("postgres") if os.geteuid() == 0 else None
        if self._user is not None:
            os.chown(folder, self._user.pw_uid, self._user.pw_gid)
        self.port = free_port()
        self._run("initdb", "-D", str(folder / "data"), "-U", "causeway", "-A", "trust", "--no-sync")
        self.start()

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self._folder}"
        self._run("pg_ctl", "-D", str(self._data), "-w", "-l", str(self._folder / "log"), "-o", options, "start")

    def stop(self) -> None:
        """Stop it at once, as a crash would."""
        self._run("pg_ctl", "-D", str(self._data), "-m", "immediate", "-w", "stop")

    def remove(self) -> None:
        shutil.rmtree(self._folder)

    def database(self) -> str:
        """Make a database and return its URL."""
        name = f"test_{uuid.uuid4().hex}"
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self.port), "-U", "causeway", name)
        return f"postgresql://causeway@127.0.0.1:{self.port}/{name}"

    @contextmanager
    def away(self) -> Iterator[None]:
        """Stopped inside the block."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Inside the block every process of it is stopped: it accepts connections and answers nothing."""
        first = psutil.Process(self.pid)
        stopped = [first, *first.children(recursive=True)]
        for process in stopped:
            process.suspend()
        try:
            yield
        finally:
            for process in stopped:
                process.resume()

    @property
    def pid(self) -> int:
        """Of its first process; each connection has a child of it."""
        return int((self._data / "postmaster.pid").read_text().splitlines()[0])

    def _run(self, program: str, *arguments: str) -> None:
        user = None if self._user is None else self._user.pw_uid
        group = None if self._user is None else self._user.pw_gid
        done = subprocess.run(
            [str(self._binaries / program), *arguments],
            user=user,
            group=group,
            cwd="/",
            stdin=subprocess.DEVNULL,
            # To a file: the server keeps the descriptor for as long as it runs.
            stdout=(log := (self._folder / "commands.log").open("ab")),
            stderr=subprocess.STDOUT,
            check=False,
        )
        log.close()
        assert done.returncode == 0, (self._folder / "commands.log").read_text()


def make_postgres() -> PostgresServer:
    """Start one, or skip the test if $CAUSEWAY_SKIP names postgres; without it, a missing PostgreSQL is a failure."""
    if "postgres" in os.environ.get("CAUSEWAY_SKIP", "").replace(",", " ").split():
        pytest.skip("CAUSEWAY_SKIP names postgres")
    initdb = POSTGRES.find()
    assert initdb is not None, f"PostgreSQL is not installed: {POSTGRES.advice}"
    return PostgresServer(Path(mkdtemp(prefix="causeway-postgres-")), Path(initdb).parent)
