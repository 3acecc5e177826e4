"""`make dist`: wheels and sdists, the npm package, llama.cpp's wheel, their checksums and an SBOM, in `dist/`.

Everything is built from copies of the tracked files, dated as the last commit, so that two builds have the same bytes:
`python -m tests.prepare.dist --check` builds all of it twice, llama.cpp included, and compares. The word `aarch64` adds
llama.cpp's wheel for that processor, by Debian's cross compiler. `--version X` writes the version of all distributions;
the one in pyproject.toml counts.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import io
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from .llama import BUILD_BYTES, build_wheel, is_cuda_wanted, wheel_home
from .node import NPM
from .places import Places, find_places
from .progress import Progress, StepFailed, consent, run

PYTHON = (".", "edge_node/sdk", "models/train")
NODE = "edge_node/sdk-ts"
IMAGES = ("*/deploy/*.Dockerfile", "*/deploy/kubernetes/*/kustomization.yaml", "docs/how-to/*.md")
_VERSION = re.compile(
    r'(?P<key>^version = "|"name": "causeway-sdk",\s+"version": "|causeway-[a-z]+(?:\[[a-z,]+\])?==|'
    r"\bcauseway/[a-z0-9-]+(?::|\n +newTag: ))"
    r'(?P<version>[^"\s]+)',
    re.MULTILINE,
)
VARIANTS = {"aarch64": ("armv8.0_1", "armv8.2_2", "armv8.6_2")}
"""ggml's names of the CPU backends in llama.cpp's wheel for a processor; ggml loads the best one that runs.

aarch64: NEON alone (Cortex-A72: Raspberry Pi 4); dot products and FP16 (A76, A78AE: Raspberry Pi 5, Jetson Orin); also
SVE2 and INT8 products (Neoverse V3AE: Jetson Thor). Elsewhere one backend has CMake's defaults: on x86-64 AVX2, FMA and
F16C.
"""
CROSS_SECONDS = 390  # measured: AMD EPYC, GCC 12
_FOR_COMPILERS = ("llama_cpp/include/", "llama_cpp/lib/cmake/", "llama_cpp/lib/pkgconfig/")
_OPENMP = "libgomp.so.1"  # comes with compilers only; llama.cpp's libraries look beside themselves first


def version_files(root: Path) -> list[Path]:
    """Return the files that name the version of our distributions, pyproject.toml first."""
    npm = [root / NODE / name for name in ("package.json", "package-lock.json")]
    images = [path for name in IMAGES for path in sorted(root.glob(name))]
    found = [*(root / folder / "pyproject.toml" for folder in PYTHON), *npm, *images]
    return [path for path in found if _VERSION.search(path.read_text(encoding="utf-8"))]


def versions(root: Path) -> list[str]:
    """Return the versions in these files: the same one, unless somebody changed it in some of them."""
    texts = [path.read_text(encoding="utf-8") for path in version_files(root)]
    return [match["version"] for text in texts for match in _VERSION.finditer(text)]


def set_version(root: Path, version: str) -> None:
    for path in version_files(root):
        text = path.read_text(encoding="utf-8")
        path.write_text(_VERSION.sub(lambda match: match["key"] + version, text), encoding="utf-8")


def tracked_files(root: Path) -> dict[str, bytes]:
    """Return what git tracks, without the tests; the licence is in the folder of each distribution."""
    names = [name for name in _git(root, "ls-files", "-z").split("\0") if name and not name.startswith("tests/")]
    files = {name: (root / name).read_bytes() for name in names if (root / name).is_file()}
    return files | {f"{folder}/LICENSE": files["LICENSE"] for folder in (*PYTHON[1:], NODE)}


def write_tree(folder: Path, files: Mapping[str, bytes], epoch: int) -> None:
    """Write files with the same modes and dates each time."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o644)
        os.utime(path, (epoch, epoch))


def build_python(source: Path, out: Path, epoch: int, log: Path) -> None:
    """Build the sdist of a folder, and the wheel from the sdist, so that the sdist is known to be whole."""
    environ = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
    backend = (
        "import os, sys; os.umask(0o22); from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"
    )
    with tempfile.TemporaryDirectory() as folder:
        run([sys.executable, "-c", backend, "build_sdist", folder], log=log, environ=environ, cwd=source)
        (packed,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(packed) as archive:
            members = [(member.name, archive.extractfile(member)) for member in archive if member.isfile()]
            files = {name: content.read() for name, content in sorted(members) if content is not None}
        write_tree(Path(folder), files, epoch)
        unpacked = packed.with_name(packed.name.removesuffix(".tar.gz"))
        run([sys.executable, "-c", backend, "build_wheel", out], log=log, environ=environ, cwd=unpacked)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(data), epoch
            archive.addfile(member, io.BytesIO(data))
    (out / packed.name).write_bytes(gzip.compress(buffer.getvalue(), mtime=epoch))


def build_npm(places: Places, source: Path, out: Path) -> None:
    """Pack the TypeScript SDK, which compiles it. npm gives each file of a package the same date."""
    folder = source / NODE
    (folder / "node_modules").symlink_to(places.root / NODE / "node_modules")
    command = (NPM.find() or "npm", "pack", "--pack-destination", out)
    run(command, log=places.logs / "dist-npm.log", advice=NPM.advice, cwd=folder)


def build_llama(places: Places, out: Path, epoch: int, progress: Progress, machine: str) -> None:
    """Compile llama.cpp for other machines (once for each cache), and pack a wheel whose name says which."""
    compiler = "" if machine == platform.machine() else f"{machine}-linux-gnu-"
    os.environ["CMAKE_ARGS"] = shlex.join(cmake_flags(machine, compiler, os.environ))
    home = wheel_home(places, os.environ)
    os.environ["CFLAGS"] = os.environ["CXXFLAGS"] = f"-ffile-prefix-map={home}=."  # asserts name their source files
    wheel = next(home.glob("*.whl"), None) or build_wheel(places, progress)
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.startswith(_FOR_COMPILERS)}
    find = [f"{compiler}gcc", f"-print-file-name={_OPENMP}"]
    openmp = subprocess.run(find, capture_output=True, text=True, check=True)
    files[f"llama_cpp/lib/{_OPENMP}"] = Path(openmp.stdout.strip()).read_bytes()
    tag = f"py3-none-manylinux_2_{needed_glibc(files.values())}_{machine}"
    (info,) = (name.removesuffix("WHEEL") for name in files if name.endswith(".dist-info/WHEEL"))
    files[f"{info}WHEEL"] = re.sub(rb"(?m)^Tag: .*$", f"Tag: {tag}".encode(), files[f"{info}WHEEL"])
    rows = [
        f"{name},sha256={_urlsafe(data)},{len(data)}\n"
        for name, data in sorted(files.items())
        if name[-7:] != "/RECORD"
    ]
    files[f"{info}RECORD"] = "".join([*rows, f"{info}RECORD,,\n"]).encode()
    target = out / f"{wheel.name.partition('-py3')[0]}-{tag}.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(files.items()):
            entry = zipfile.ZipInfo(name, time.gmtime(epoch)[:6])
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)


def cmake_flags(machine: str, compiler: str, environ: Mapping[str, str]) -> list[str]:
    """Return CMake's flags for all processors of a kind. `compiler`: the prefix of a cross compiler's names."""
    flags = ["GGML_NATIVE=OFF"]
    if machine in VARIANTS and not is_cuda_wanted(environ):  # with CUDA the GPU does the work
        flags += ["GGML_BACKEND_DL=ON", "GGML_CPU_ALL_VARIANTS=ON"]
        flags.append(f"CAUSEWAY_CPU_VARIANTS={';'.join(VARIANTS[machine])}")
        flags.append("CMAKE_PLATFORM_NO_VERSIONED_SONAME=ON")  # wheels have no links: each would be there three times
    if compiler:
        flags += ["CMAKE_SYSTEM_NAME=Linux", f"CMAKE_SYSTEM_PROCESSOR={machine}"]
        flags += [f"CMAKE_C_COMPILER={compiler}gcc", f"CMAKE_CXX_COMPILER={compiler}g++"]
    return [f"-D{flag}" for flag in flags]


def ask(places: Places, machine: str) -> None:
    """Ask for consent to a cross compilation. Raises StepFailed without it, or without the compiler."""
    if shutil.which(f"{machine}-linux-gnu-g++") is None:
        package = f"g++-{machine.replace('_', '-')}-linux-gnu"
        raise StepFailed(f"Building for {machine} needs its compiler.", f"Debian: apt-get install {package} (70 MB).")
    needs = (
        f"about {math.ceil(CROSS_SECONDS / 60)} CPU-minutes, and {BUILD_BYTES / 1e9:.1f} GB in {places.cache} meanwhile"
    )
    consent(f"llama.cpp for {machine} needs {needs}.")


def needed_glibc(libraries: Iterable[bytes]) -> int:
    """Return the minor version of the oldest glibc 2 that has all the symbols that ELF files name."""
    return max(int(minor) for data in libraries for minor in re.findall(rb"\0GLIBC_2\.(\d+)", data))


def _urlsafe(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def bill_of_materials(root: Path, epoch: int) -> dict[str, object]:
    """Return a CycloneDX document of the product and what it runs with."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    product = {"type": "application", "name": project["name"], "version": project["version"]}
    metadata = {
        "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch)),
        "component": {**product, "licenses": [{"expression": project["license"]}]},
    }
    licences = [{"expression": "GPL-3.0-or-later WITH GCC-exception-3.1"}]
    components = [*locked_components(root), {"type": "library", "name": _OPENMP, "licenses": licences}]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": metadata,
        "components": components,
    }


def locked_components(root: Path) -> list[dict[str, object]]:
    """Return the packages of the lock files as CycloneDX has them, with the hashes of all their archives."""
    locks = [root / "edge_node" / "deploy" / f"requirements{part}.txt" for part in ("", "-llama")]
    text = "\n".join(lock.read_text(encoding="utf-8") for lock in locks)
    return [
        {
            "type": "library",
            "bom-ref": f"pkg:pypi/{name}@{version}",
            "name": name,
            "version": version,
            "purl": f"pkg:pypi/{name}@{version}",
            "hashes": [{"alg": "SHA-256", "content": digest} for digest in re.findall(r"sha256:(\w+)", rest)],
        }
        for name, version, rest in sorted(re.findall(r"^([\w.-]+)==(\S+)((?:.*\\\n)*.*)", text, re.MULTILINE))
    ]


def build(places: Places, out: Path, progress: Progress, machines: Sequence[str]) -> str:
    """Build everything into an empty folder, llama.cpp for each machine. Return SHA256SUMS' text. Raises StepFailed."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    epoch = int(_git(places.root, "log", "-1", "--format=%ct"))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        write_tree(source, tracked_files(places.root), epoch)
        for distribution in PYTHON:
            progress.show(f"building {distribution}")
            build_python(source / distribution, out, epoch, places.logs / "dist-python.log")
        build_npm(places, source, out)
    for machine in machines:
        build_llama(places, out, epoch, progress, machine)
    (out / "sbom.cdx.json").write_text(json.dumps(bill_of_materials(places.root, epoch), indent=1) + "\n")
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(out.iterdir()))
    (out / "SHA256SUMS").write_text(sums, encoding="utf-8")
    return sums


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(prog="dist", description="Builds what is released.")
    parser.add_argument(
        "machine", nargs="?", choices=sorted(VARIANTS), help="also llama.cpp's wheel for this processor"
    )
    parser.add_argument("--check", action="store_true", help="build twice, llama.cpp too, and compare")
    parser.add_argument("--version", help="write this version into all distributions, and stop")
    args = parser.parse_args()
    places, progress = find_places(os.environ), Progress(sys.stdout)
    if args.version:
        set_version(places.root, args.version)
        return
    if _git(places.root, "status", "--porcelain", "--untracked-files=no"):
        raise StepFailed("The checkout has changes that are in no commit: what is released has one.")
    machines = list(dict.fromkeys(filter(None, (platform.machine(), args.machine))))
    for machine in machines[1:]:
        ask(places, machine)
    progress.begin("[dist]", "building")
    sums = build(places, places.root / "dist", progress, machines)
    progress.end("built")
    print(sums, end="")
    if args.check:
        with tempfile.TemporaryDirectory() as folder:
            progress.begin("[check]", "building again")
            again = build(replace(places, cache=Path(folder, "cache")), Path(folder, "dist"), progress, machines)
            progress.end("built again")
        changed = sorted(line.split()[-1] for line in set(sums.splitlines()) ^ set(again.splitlines()))
        if changed:
            raise SystemExit(f"Two builds differ: {', '.join(sorted(set(changed)))}.")
        print("Both builds have the same bytes.")


if __name__ == "__main__":
    try:
        main()
    except StepFailed as fault:
        raise SystemExit("\n".join(filter(None, (fault.fault, fault.tail, fault.advice)))) from fault
