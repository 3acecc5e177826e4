"""The folder of a fleet that `causeway-fleet quick` sets up: around a policy, often the checkout of a git repository.

fleet.yaml, trust.yaml, keys/*.pub   written once, for git
.causeway/                           private keys, the control plane's state and log, the join token; never for git
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from string import Template

import msgspec

from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.folders import write_new

from ..repository.fleet_file import FLEET_FILE
from ..repository.folder import cases_of, fleet_name
from .keys import PRIVATE, PUBLIC, TRUST_FILE, new_key, read_trust

OWNER, SERVER = "owner", "server"


def fleet_of(policy: Path) -> Path:
    """Return the folder of a policy's fleet: the nearest one with a `fleet.yaml`, the git checkout, or its own."""
    for folder in policy.resolve().parents:
        if (folder / FLEET_FILE).exists() or (folder / ".git").exists():
            return folder
    return policy.resolve().parent


def state_of(folder: Path) -> Path:
    """Return the folder of what must not be in git."""
    return folder / ".causeway"


def key_of(folder: Path, name: str) -> Path:
    """Return the path of a private key, `OWNER` or `SERVER`, each in a folder of its own."""
    return state_of(folder) / f"{name}-key" / (name + PRIVATE)


def signing_keys(folder: Path) -> list[Path]:
    """Return the owner's private key, unless others sign this fleet."""
    trust, key = read_trust(folder)[0], key_of(folder, OWNER)
    return [key] if key.exists() and trust is not None and OWNER in trust.names.values() else []


def committed(policy: Path, folder: Path) -> str:
    """Return the commit of a policy and its cases, shortened; "" without git.

    Raises:
        ConfigError: They differ from the commit.
    """
    files = [str(path) for path in (policy.resolve(), *cases_of(policy.resolve()))]
    git = ["git", "-C", str(folder)]
    if shutil.which("git") is None or not any((one / ".git").exists() for one in policy.resolve().parents):
        return ""
    changed, head = (
        subprocess.run([*git, *one], capture_output=True, text=True, check=False)
        for one in (("status", "--porcelain", "--", *files), ("rev-parse", "--short", "HEAD"))
    )
    if changed.returncode:
        raise ConfigError(f"Git failed: {changed.stderr.strip()}.", where=str(folder))
    if head.returncode or changed.stdout.strip():
        names = ", ".join(line.split()[-1] for line in changed.stdout.splitlines())
        raise ConfigError(
            f"Not in git: {names}. Commit it first, so that git says what devices run.", where=str(folder)
        )
    return head.stdout.strip()


def set_up(folder: Path, policy: Path) -> list[Path]:
    """Write what a fleet lacks; what is there stays. Returns the new files. Interrupted, it goes on the next time.

    Raises:
        FileExistsError: A public key of this name is there already, and is another key.
        OSError: A file cannot be written.
    """
    state, made = state_of(folder), list[Path]()
    state.mkdir(mode=0o700, exist_ok=True)
    name = msgspec.json.encode(policy.resolve().relative_to(folder).as_posix()).decode()
    for path, text in (
        (state / ".gitignore", "*\n"),
        (folder / ".gitignore", "*.pem\npublished/blobs/\n"),
        (folder / FLEET_FILE, _template("quick_fleet.yaml").substitute(name=fleet_name(folder), policy=name)),
    ):
        if not path.exists():
            write_new(path, text.encode(), 0o644)
            made.append(path)
    if (folder / TRUST_FILE).exists():
        return made
    for key in (OWNER, SERVER):
        private, public = key_of(folder, key), folder / "keys" / (key + PUBLIC)
        if not private.parent.exists():  # both files of a key are there, or neither
            partial = private.parent.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            new_key(partial, key, None)
            partial.rename(private.parent)
        content = private.with_suffix(PUBLIC).read_bytes()
        if not public.exists():
            public.parent.mkdir(exist_ok=True)
            write_new(public, content, 0o644)
            made.append(public)
        elif public.read_bytes() != content:
            raise FileExistsError(f"{public} is there already, and is another key: remove it, or write a {TRUST_FILE}.")
    write_new(folder / TRUST_FILE, _template("quick_trust.yaml").template.encode(), 0o644)
    return [*made, folder / TRUST_FILE]


def _template(name: str) -> Template:
    return Template(Path(__file__).with_name(name).read_text(encoding="utf-8"))
