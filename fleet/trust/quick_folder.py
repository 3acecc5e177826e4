"""The folder of a fleet that `causeway-fleet quick` sets up: around a policy, often the checkout of a git repository.

fleet.yaml, trust.yaml, keys/*.pub         written once, for git
.gitignore of .causeway, keys, published   written once: no private key gets into git
.causeway/                                 private keys, the control plane's state and log, the join token
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from string import Template

import msgspec

from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.folders import write_new
from causeway_server.router.serving.tls.contexts import read_certificate

from ..repository.fleet_file import FLEET_FILE
from ..repository.folder import cases_of, fleet_name
from ..repository.policies import CASES
from .certificates import init
from .keys import PRIVATE, PUBLIC, TRUST_FILE, new_key, read_trust

OWNER, SERVER = "owner", "server"
_RENEWAL_S = 30 * 86_400.0


def fleet_of(policy: Path) -> Path:
    """Return the folder of a policy's fleet: the nearest one with a `fleet.yaml`, the git checkout, or its own."""
    for folder in policy.resolve().parents:
        if (folder / FLEET_FILE).exists() or (folder / ".git").exists():
            return folder
    return policy.resolve().parent


def state_of(folder: Path) -> Path:
    """Return the folder of what must not be in git."""
    return folder / ".causeway"


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait until no other command sets this fleet up, signs it, or starts its control plane."""
    state_of(folder).mkdir(mode=0o700, exist_ok=True)
    with (state_of(folder) / "command.lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def key_of(folder: Path, name: str) -> Path:
    """Return the path of a private key, `OWNER` or `SERVER`, each in a folder of its own."""
    return state_of(folder) / f"{name}-key" / (name + PRIVATE)


def private_keys(folder: Path) -> dict[str, Path]:
    """Return the private keys, `OWNER` and `SERVER`, that `trust.yaml` names; the file of a lost one is missing."""
    trust = read_trust(folder)[0]
    names = () if trust is None else trust.names.values()
    return {name: key_of(folder, name) for name in (OWNER, SERVER) if name in names}


def committed(policy: Path) -> str:
    """Return the shortened commit of a policy and its cases; "" without git. Raises ConfigError if they differ."""
    path = policy.resolve()
    if shutil.which("git") is None or not any((one / ".git").exists() for one in path.parents):
        return ""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "--literal-pathspecs", "-C", str(path.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    head = git("rev-parse", "--short", "HEAD")
    if head.returncode:
        raise ConfigError(
            f"The Git repository has no commit yet, or git failed: {head.stderr.strip()}", where=str(path)
        )
    files = [path, *cases_of(path)]
    wrong = [file.name for file in files if git("ls-files", "--error-unmatch", "--", str(file)).returncode]
    if not wrong:
        changed = git("diff", "--name-only", "--relative", "-z", "HEAD", "--", str(path), str(path.parent / CASES))
        if changed.returncode:
            raise ConfigError(f"Git failed: {changed.stderr.strip()}", where=str(path))
        wrong = changed.stdout.split("\0")[:-1]
    if wrong:
        message = f"Not in git: {', '.join(wrong)}. Commit it first, so that git says what devices run."
        raise ConfigError(message, where=str(path.parent))
    return head.stdout.strip()


def set_up(folder: Path, policy: Path) -> list[Path]:
    """Write what a fleet lacks, inside `one_at_a_time`, and return the new files; interrupted, it goes on next time.

    Raises FileExistsError for another public key of this name, or OSError.
    """
    state, made = state_of(folder), list[Path]()
    name = msgspec.json.encode(policy.resolve().relative_to(folder).as_posix()).decode()
    for path, text in (
        (state / ".gitignore", "*\n"),
        (folder / "keys" / ".gitignore", "*.pem\n"),
        (folder / "published" / ".gitignore", "blobs/\n"),
        (folder / FLEET_FILE, _template("quick_fleet.yaml").substitute(name=fleet_name(folder), policy=name)),
    ):
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_new(path, text.encode(), 0o644)
            made.append(path)
    if (folder / TRUST_FILE).exists():
        return made
    for key in (OWNER, SERVER):
        private, public = key_of(folder, key), folder / "keys" / (key + PUBLIC)
        if not private.parent.exists():  # both files of a key are there, or neither
            with _complete(private.parent) as partial:
                new_key(partial, key, None)
        content = private.with_suffix(PUBLIC).read_bytes()
        if not public.exists():
            write_new(public, content, 0o644)
            made.append(public)
        elif public.read_bytes() != content:
            raise FileExistsError(
                f"{public} already exists with another key. Remove the file, or write a {TRUST_FILE}."
            )
    write_new(folder / TRUST_FILE, _template("quick_trust.yaml").template.encode(), 0o644)
    return [*made, folder / TRUST_FILE]


def server_certificate(folder: Path, host: str, now: float) -> tuple[Path, Path]:
    """Return certificate and key of a control plane; make them if they are missing or expire within 30 days.

    `folder`: the fleet's, whose CA is in `.causeway/tls`; `host`: name or address; `now`: Unix seconds. Raises
    ConfigError or OSError.
    """
    tls = state_of(folder) / "tls"
    if not tls.exists():
        with _complete(tls) as partial:
            init(partial, (), now)
    certificate, key = tls / f"{host}.pem", tls / f"{host}.key"
    if not certificate.exists() or (
        read_certificate(certificate, str(certificate)).not_valid_after_utc.timestamp() < now + _RENEWAL_S
    ):
        certificate.unlink(missing_ok=True)
        key.unlink(missing_ok=True)  # of no use without its certificate
        init(tls, (host,), now)
    return certificate, key


@contextmanager
def _complete(folder: Path) -> Iterator[Path]:
    """Yield the path of a folder to make, which gets its name when it is complete."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    yield partial
    partial.rename(folder)


def _template(name: str) -> Template:
    return Template(Path(__file__).with_name(name).read_text(encoding="utf-8"))
