"""`make dist-check`: install what `make dist` built, as a user does, and time the device's first answer.

The environment is empty: no checkout, no compiler, no index. pip fetches the packages of other projects beforehand.
With the word `debian` the images and the device's Debian package follow, with `aarch64` that processor under qemu: see
`checks`.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .checks import aarch64, debian
from .checks.wheels import ANSWER, fetch, wheels
from .places import Places, find_places
from .progress import StepFailed, run

BOUND_S = 60.0  # from the install to the first answer
MORE = {"aarch64": aarch64, "debian": debian}
"""What words in ARGS add. Each asks before anything is fetched."""
STATE = Path(".local", "state", "causeway")


def first_answer(places: Places, wishes: list[str], hand: Path, home: Path) -> float:
    """Install, ask and stop. Return the seconds from the beginning of the install to the first answer."""
    began = time.monotonic()
    environment, temporary = home / "venv", home / "tmp"
    temporary.mkdir()
    environ = {"HOME": str(home), "TMPDIR": str(temporary), "PATH": f"{environment}/bin", "LANG": "C.UTF-8"}
    log = places.logs / "dist-install.log"
    run((places.python, "-m", "venv", environment), log=log, environ=environ, cwd=home)
    flags: list[str | Path] = ["--no-index", "--find-links", hand]
    run([environment / "bin" / "python", "-m", "pip", "install", *flags, *wishes], log=log, environ=environ, cwd=home)
    print(f"installed after {time.monotonic() - began:.1f} s", flush=True)
    up = (environment / "bin" / "causeway-edge", "up", "--no-cloud", "--once", "--port", "0")
    taken: float | None = None
    with subprocess.Popen(up, stdout=subprocess.PIPE, text=True, env=environ, cwd=home) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            if taken is None and ANSWER.match(line):
                taken = time.monotonic() - began
    if taken is None or child.returncode != 0:
        raise StepFailed(f"causeway-edge up ended with status {child.returncode} and {taken or 'no'} first answer.")
    return taken


def leftovers(home: Path) -> list[str]:
    """Remove the environment. Return what is left beside the state folder: files, and processes of this home."""
    shutil.rmtree(home / "venv")
    files = [path.relative_to(home) for path in home.rglob("*") if not path.is_dir()]
    running = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.fsencode(f"HOME={home}") in (process / "environ").read_bytes():
                running.append(f"process {process.name}")
        except OSError:
            continue  # another user's, or ended meanwhile
    return [str(path) for path in files if not path.is_relative_to(STATE)] + running


def main() -> None:
    places, more = find_places(os.environ), sys.argv[1:]
    if unknown := set(more) - MORE.keys():
        raise StepFailed(f"ARGS={' '.join(sorted(unknown))} is unknown.", f"Give some of: {' '.join(MORE)}.")
    for name in more:
        MORE[name].ask(places)
    wishes = wheels(places, platform.machine())
    hand = fetch(places, wishes, places.cache / "dist-packages")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        taken = first_answer(places, wishes, hand, home)
        left = leftovers(home)
    print(f"first answer after {taken:.1f} s, bound {BOUND_S:.0f} s")
    if left:
        raise StepFailed(f"Removal leaves more than {STATE}: {', '.join(left)}.")
    if taken > BOUND_S:
        raise StepFailed("The first answer took too long.")
    print(f"removal leaves {STATE} alone")
    for name in more:
        MORE[name].check(places)


if __name__ == "__main__":
    try:
        main()
    except StepFailed as fault:
        raise SystemExit("\n".join(filter(None, (fault.fault, fault.tail, fault.advice)))) from fault
