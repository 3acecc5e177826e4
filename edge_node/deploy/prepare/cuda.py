"""What compiles llama.cpp for an NVIDIA GPU: `make setup CUDA=1`.

It takes nvcc, and cuBLAS with its headers. A toolkit from NVIDIA or JetPack has both. Where there is only nvcc, cuBLAS
comes from the package index (`nvidia-cublas`, some hundred MB) into the cache, where the compiled library finds it.

The build is for the GPU of this machine. $CUDAARCHS names others, as CMake does: `CUDAARCHS=87 make setup CUDA=1` for
Orin, 90 for H100 and H200, 89 for RTX 4000.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .environments import NETWORK_ADVICE
from .places import Places, child_environment
from .progress import Progress, StepFailed, run

_TOOLKITS = (Path("/usr/local/cuda"), Path("/opt/cuda"))
_OFF = ("", "0", "off", "no", "false")
GPU_FILES = (Path("/etc/nv_tegra_release"), Path("/dev/nvidia0"))  # JetPack; any other driver


@dataclass(frozen=True)
class Toolkit:
    """The CUDA compiler of this machine, the folder of its toolkit, and the major and minor number of its version."""

    nvcc: Path
    root: Path
    version: tuple[int, int]

    @property
    def has_cublas(self) -> bool:
        return any(self.root.glob("include/cublas_v2.h")) or any(self.root.glob("targets/*/include/cublas_v2.h"))

    @property
    def has_driver_library(self) -> bool:
        """Whether there is a libcuda.so to link: llama.cpp's pool of virtual memory needs it."""
        folders = [self.root / "lib64" / "stubs", *self.root.glob("targets/*/lib/stubs")]
        return any((folder / "libcuda.so").exists() for folder in folders)


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Whether the user asks for a build for CUDA."""
    return environ.get("CUDA", "").lower() not in _OFF


def build_key(environ: Mapping[str, str]) -> str:
    """What of this module the compiled wheel depends on."""
    return f"cuda {environ.get('CUDAARCHS', '')}" if is_wanted(environ) else ""


def cuda_flags(places: Places, python: Path, environ: Mapping[str, str], progress: Progress) -> list[str]:
    """Return CMake's flags for a build for CUDA; cuBLAS is fetched if the toolkit has none. Raises StepFailed."""
    toolkit = find_toolkit(environ)
    flags = ["-DGGML_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={toolkit.nvcc}", f"-DCMAKE_CUDA_ARCHITECTURES={_archs(environ)}"]
    # The library is found where it was linked: in the toolkit, or in our cache.
    flags.append("-DCMAKE_INSTALL_RPATH_USE_LINK_PATH=ON")
    if not toolkit.has_cublas:
        flags += _cublas_flags(places, python, toolkit, progress)
    if not toolkit.has_driver_library:
        flags.append("-DGGML_CUDA_NO_VMM=ON")
    return flags


def find_toolkit(environ: Mapping[str, str]) -> Toolkit:
    """Find nvcc: by $CUDACXX, on PATH, in $CUDA_HOME, where NVIDIA installs it. Raises StepFailed."""
    homes = [Path(environ["CUDA_HOME"])] if environ.get("CUDA_HOME") else []
    named = environ.get("CUDACXX") or shutil.which("nvcc", path=environ.get("PATH"))
    found = [Path(named)] if named else [home / "bin" / "nvcc" for home in (*homes, *_TOOLKITS)]
    for nvcc in found:
        # The nvcc on PATH may be a link or a script: only the compiler itself knows where its toolkit is.
        release = re.search(r"release (\d+)\.(\d+)", _ask(nvcc, "--version"))
        top = re.search(r"TOP=(\S+)", _ask(nvcc, "--dryrun", "-x", "cu", "-c", os.devnull))
        if release is not None and top is not None:
            return Toolkit(nvcc, Path(top.group(1)).resolve(), (int(release.group(1)), int(release.group(2))))
    raise StepFailed(
        "CUDA=1 needs NVIDIA's compiler, and there is no nvcc",
        "Install the CUDA toolkit (JetPack: apt-get install nvidia-jetpack), or name it: CUDACXX=/path/nvcc make ...",
    )


def _ask(*command: str | Path) -> str:
    try:
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return finished.stdout + finished.stderr


def _archs(environ: Mapping[str, str]) -> str:
    named = environ.get("CUDAARCHS", "")
    if named:
        return named
    if any(path.exists() for path in GPU_FILES):
        return "native"
    raise StepFailed(
        "CUDA=1 builds for the GPU of this machine, and there is none",
        "Name the GPU to build for: CUDAARCHS=87 make ... (Orin; 90: H100 and H200; 89: RTX 4000).",
    )


def _cublas_flags(places: Places, python: Path, toolkit: Toolkit, progress: Progress) -> list[str]:
    """Fetch cuBLAS of the toolkit's version into the cache, and return the flags that name it."""
    major, minor = toolkit.version
    home = places.cache / f"cublas-{major}.{minor}"
    package = "nvidia-cublas" if major > 12 else f"nvidia-cublas-cu{major}"
    if not home.is_dir():
        progress.show(f"fetching cuBLAS {major}.{minor} (some hundred MB)")
        draft = home.with_name(home.name + ".draft")
        shutil.rmtree(draft, ignore_errors=True)
        wish = f"{package}=={major}.{minor}.*"
        run(
            [python, "-m", "pip", "install", "--no-deps", "--progress-bar=off", "--target", draft, wish],
            log=places.logs / "cublas.log",
            environ=child_environment(os.environ),
            advice=f"{NETWORK_ADVICE} Or install NVIDIA's whole toolkit, which has cuBLAS.",
        )
        draft.replace(home)
    (header,) = home.glob("nvidia/*/include/cublas_v2.h")
    folder = header.parent.parent
    libraries = {name: next(iter(folder.glob(f"lib/lib{name}.so*"))) for name in ("cublas", "cublasLt")}
    return [
        f"-DCMAKE_CUDA_FLAGS=-I{header.parent}",
        f"-DCMAKE_CXX_FLAGS=-I{header.parent}",
        *(f"-DCUDA_{name}_LIBRARY={path}" for name, path in libraries.items()),
    ]
