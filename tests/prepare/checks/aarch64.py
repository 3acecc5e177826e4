"""llama.cpp's wheel for aarch64, tried under qemu: `make dist-check ARGS=aarch64`, after `make dist ARGS=aarch64`.

It needs root, and Debian's debootstrap and qemu-user-static. Debian's packages for arm64 are unpacked, not configured:
Python runs from them. The wheels are installed there as a user does it, for each kind of processor qemu shows which CPU
backend llama.cpp loads, the device answers with the model that ships, and the engine's tests run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..environments import NETWORK_ADVICE
from ..places import Places
from ..progress import Progress, StepFailed, consent, run
from .debian import SUITE
from .wheels import ANSWER, fetch, wheels

MACHINE = "aarch64"
PYTHON = "3.11"  # of this suite
PROGRAMS = ("debootstrap", "dpkg-deb", "qemu-aarch64-static")
DOWNLOAD_MB, DISK_GB = 110, 2  # measured: 42 MB of Debian, the rest packages for Python
PROCESSORS = {"cortex-a72": "armv8.0_1", "cortex-a76": "armv8.2_2", "max,sve-max-vq=1": "armv8.6_2"}
"""qemu's processors, and ggml's backend for each."""
TESTS = [f"tests/models/llama_cpp/test_{name}.py" for name in ("answers", "batching", "embeddings", "kv_types")]
"""The engine in the process of the tests: those that start engines as children are too slow under qemu."""
TEST_PACKAGES = ("gguf", "hypothesis", "pytest", "pytest-asyncio", "pytest-timeout")
_BINFMT = Path("/proc/sys/fs/binfmt_misc")
_NAME = "causeway-aarch64"
_ELF = (
    r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00",
    r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff",
)
_ENTER = 'mount -t proc proc "$1/proc"; mount --rbind /dev "$1/dev"; mount -t tmpfs tmpfs "$1/tmp"; exec chroot "$@"'
_BACKEND = """\
import llama_cpp
llama_cpp.llama_backend_init()
paths = {line.split()[-1] for line in open("/proc/self/maps") if "/libggml-cpu-" in line}
print(*(path.rpartition("/libggml-cpu-")[2].removesuffix(".so") for path in paths))
"""


def require_host() -> None:
    """Check for root and the programs. Raises StepFailed."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        raise StepFailed(
            f"Trying wheels for {MACHINE} needs root and {', '.join(missing or PROGRAMS)}.",
            "Debian: apt-get install debootstrap qemu-user-static; then run it as root.",
        )


def ask(places: Places) -> None:
    """Ask for consent to the download. Raises StepFailed without it, or where the host does not fit."""
    require_host()
    needs = f"{DOWNLOAD_MB} MB of downloads, and {DISK_GB} GB in {places.cache / MACHINE}"
    consent(f"Trying the wheels for {MACHINE} under qemu needs {needs}.")


def check(places: Places) -> None:
    """Install and try the wheels. Raises StepFailed."""
    wheels(places, MACHINE)
    progress = Progress(sys.stdout)
    progress.begin(f"[{MACHINE}]", "fetching")
    base = make_base(places)
    hand = fetch_packages(places)
    with tempfile.TemporaryDirectory(dir=places.cache / MACHINE) as folder, emulated():
        root = Path(folder, "root")
        run(["cp", "-a", base, root], log=places.logs / "dist-aarch64.log")
        install(places, root, hand, progress)
        progress.end("installed")
        try_backends(places, root)
        answer = Inside(places, root, "cortex-a76")(
            "answer", "causeway-edge", "up", "--no-cloud", "--once", "--port", "0"
        )
        if not any(map(ANSWER.match, answer.splitlines())):
            raise StepFailed("The device did not answer.", tail=answer[-2000:])
        print("the device answers with the model that ships", flush=True)
        print(run_tests(places, root), flush=True)


def make_base(places: Places) -> Path:
    """Unpack Debian with Python for arm64, once. Returns the folder."""
    base = places.cache / MACHINE / SUITE
    if not (base / "made").exists():
        shutil.rmtree(base, ignore_errors=True)
        log = places.logs / "dist-debootstrap.log"
        flags = ("--foreign", "--arch=arm64", "--variant=minbase", "--include=python3,python3-venv")
        run(["debootstrap", *flags, SUITE, base], log=log, advice=NETWORK_ADVICE)
        for package in sorted((base / "var/cache/apt/archives").glob("*.deb")):
            run(["dpkg-deb", "--extract", package, base], log=log)
            package.unlink()
        (base / "made").touch()
    return base


def fetch_packages(places: Places) -> Path:
    """Fetch what our wheels and the tests need for this processor, into the cache. Returns the folder."""
    lock = (places.edge_deploy / "requirements-dev.txt").read_text(encoding="utf-8")
    pinned = [word for name in TEST_PACKAGES for word in re.findall(rf"^{name}==\S+", lock, re.MULTILINE)]
    tags = [f"--platform=manylinux_2_{minor}_{MACHINE}" for minor in range(17, 37)]
    flags = (*tags, f"--platform=manylinux2014_{MACHINE}", "--implementation=cp", f"--python-version={PYTHON}")
    return fetch(places, [*wheels(places, MACHINE), *pinned], places.cache / MACHINE / "packages", flags)


@contextmanager
def emulated() -> Iterator[None]:
    """Let the kernel start programs for this processor with qemu, unless it does so already."""
    if not (_BINFMT / "register").exists():
        subprocess.run(["mount", "-t", "binfmt_misc", "binfmt_misc", _BINFMT], check=True)
    if any((_BINFMT / name).exists() for name in ("qemu-aarch64", _NAME)):
        yield
        return
    qemu = shutil.which("qemu-aarch64-static")
    (_BINFMT / "register").write_text(f":{_NAME}:M::{':'.join(_ELF)}:{qemu}:F")  # F: found outside of a root, too
    try:
        yield
    finally:
        (_BINFMT / _NAME).write_text("-1")


class Inside:
    """Runs programs of the wheels' environment in a root file system, on one of qemu's processors."""

    def __init__(self, places: Places, root: Path, processor: str) -> None:
        self._logs = places.logs
        path = "/opt/venv/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        self._environ = {"HOME": "/root", "LANG": "C.UTF-8", "PATH": path, "QEMU_CPU": processor}
        self._enter = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", _ENTER, "sh", root)

    def __call__(self, log: str, *command: str) -> str:
        """Return what the program prints. Raises StepFailed."""
        path = self._logs / f"dist-aarch64-{log}.log"
        run([*self._enter, "/usr/bin/env", *command], log=path, environ=self._environ)
        return path.read_text(encoding="utf-8")


def install(places: Places, root: Path, hand: Path, progress: Progress) -> None:
    """Install our wheels and the tests' packages without an index."""
    inside, wishes = Inside(places, root, "cortex-a76"), root / "opt" / "packages"
    shutil.copytree(hand, wishes)
    ours = [wish.rpartition("/")[2] for wish in wheels(places, MACHINE)]
    for name in ours:
        shutil.copy(places.root / "dist" / name.partition("[")[0], wishes)
    progress.show("installing")
    inside("venv", "/usr/bin/python3", "-m", "venv", "/opt/venv")
    names = [f"/opt/packages/{name}" for name in ours]
    inside(
        "install", "pip", "install", "--no-index", "--no-compile", "--find-links=/opt/packages", *names, *TEST_PACKAGES
    )


def try_backends(places: Places, root: Path) -> None:
    """Compare the CPU backend that llama.cpp loads on each processor with the expected one. Raises StepFailed."""
    for processor, expected in PROCESSORS.items():
        loaded = Inside(places, root, processor)("backend", "python", "-c", _BACKEND).splitlines()[-1]
        print(f"{processor}: llama.cpp loads {loaded}", flush=True)
        if loaded != expected:
            raise StepFailed(f"On {processor} llama.cpp loads {loaded or 'no backend'}, not {expected}.")


def run_tests(places: Places, root: Path, tests: Sequence[str] = TESTS) -> str:
    """Run tests of this commit with the installed wheels. Returns pytest's last line. Raises StepFailed."""
    log, source, archive = places.logs / "dist-aarch64.log", root / "src", root / "tests.tar"
    source.mkdir()
    names = ("tests", "models/train/src", "pyproject.toml")
    run(["git", "archive", "--output", archive, "HEAD", *names], log=log, cwd=places.root)
    run(["tar", "--extract", "--file", archive, "--directory", source], log=log)
    words = ("python", "-m", "pytest", "-q", "-m", "not slow", "--rootdir=/src", *tests)
    return Inside(places, root, "cortex-a76")("tests", "--chdir=/src", *words).strip().splitlines()[-1]
