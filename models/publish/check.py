"""Checks of files of unknown origin. A GGUF: read its header, render its chat template, load it and decode one step. A
LoRA adapter: load it with its model and decode one step. An mmproj file: load it with its model and encode an image.

All checks run in a child process with bounded memory and time: a file that crashes llama.cpp, exhausts memory or never
finishes ends only the child, and the caller gets an ArtifactError.

    python -m causeway_server.models.publish.check FILE CONTEXT [adapter|mmproj MODEL]      prints a `_Verdict` as JSON
"""

from __future__ import annotations

import importlib.util
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from causeway_server.router.errors import EngineUnavailable, InvalidRequest
from causeway_server.router.types import Message

from ..catalog.artifact import ArtifactError
from ..catalog.gguf import GgufFile, adapted_architecture, read_gguf
from ..catalog.projector import check_mtmd, read_mmproj
from ..child_process import child_command, child_environment

GIB = 2**30
BASE_MEMORY_BYTES = 2 * GIB  # interpreter, libraries, buffers of one step; weights come on top
BASE_TIME_S = 60.0
SLOWEST_BYTES_PER_S = 20e6  # of reading the weights, from an SD card
_CHECK_CONTEXT_TOKENS = 512
_INSTALL = "run `make setup`, or `pip install 'causeway-router[engine]'`"
_KIND, _MODEL = 3, 4  # places of the arguments
_SIDE = 96  # of the image that is tried with an mmproj file, in pixels


class CheckLimits(msgspec.Struct, frozen=True):
    """The limits of the child process. `memory_bytes`: private memory, without the mapped file."""

    memory_bytes: int
    time_s: float


class _Verdict(msgspec.Struct):
    gguf: GgufFile | None = None
    fault: str = ""


def require_llama_cpp(find: Callable[[str], object] = importlib.util.find_spec) -> None:
    """Raise ArtifactError if llama.cpp's bindings, which check every GGUF, are not installed."""
    if find("llama_cpp") is None:
        raise ArtifactError(f"llama.cpp, which checks every GGUF, is missing: {_INSTALL}")


def limits_for(size_bytes: int) -> CheckLimits:
    """Return the limits for a file of `size_bytes`. Repacked weights take their size in memory again."""
    return CheckLimits(BASE_MEMORY_BYTES + size_bytes * 3 // 2, BASE_TIME_S + size_bytes / SLOWEST_BYTES_PER_S)


def check_gguf(file: Path, context: int, limits: CheckLimits | None = None) -> GgufFile:
    """Check a GGUF file in a child process and describe it. Raises ArtifactError, also beyond the limits.

    `context`: tokens that it must hold; at most 512 are tried. `limits` None: `limits_for` its size.
    """
    verdict = _judge(file, [str(context)], limits or limits_for(file.stat().st_size))
    assert verdict.gguf is not None
    return verdict.gguf


def check_beside(kind: Literal["adapter", "mmproj"], file: Path, model: Path) -> None:
    """Check a GGUF of a LoRA adapter or mmproj of `model` in a child process.

    Raises ArtifactError for another kind or model, a crash, a build without mtmd, or beyond the limits.
    """
    if kind == "mmproj":
        check_mtmd(file)
    try:
        size_bytes = file.stat().st_size + model.stat().st_size
    except OSError as error:
        raise ArtifactError(f"{error.filename}: {error.strerror}") from error
    _judge(file, [str(_CHECK_CONTEXT_TOKENS), kind, str(model)], limits_for(size_bytes))


def _judge(file: Path, arguments: list[str], limits: CheckLimits) -> _Verdict:
    command = child_command(__name__, str(file), *arguments)
    environ = child_environment(CAUSEWAY_CHECK_BYTES=str(limits.memory_bytes), OMP_NUM_THREADS="1")
    try:
        child = subprocess.run(
            command, env=environ, capture_output=True, timeout=limits.time_s, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise ArtifactError(f"{file}: refused, because checking it took longer than {limits.time_s:.0f} s") from None
    try:
        verdict = msgspec.json.decode(child.stdout, type=_Verdict)
    except msgspec.DecodeError:
        raise ArtifactError(f"{file}: {_death(child.returncode, limits)}") from None
    if verdict.fault:
        raise ArtifactError(verdict.fault)
    return verdict


def _death(status: int, limits: CheckLimits) -> str:
    bound = f"{limits.memory_bytes / GIB:.1f} GiB"
    if status < 0:
        name = signal.Signals(-status).name
        return f"refused, because llama.cpp crashes on it ({name}) or needs more than {bound} besides its weights"
    return f"refused, because checking it failed with status {status}, perhaps for lack of memory (at most {bound})"


def _examine(file: Path, context: int) -> GgufFile:
    gguf = read_gguf(file)
    if gguf.chat_template is not None:
        _try_template(file, gguf.chat_template)
    _try_load(file, context)
    return gguf


def _try_template(file: Path, template: str) -> None:
    from ..chat.template import render

    try:
        render(template, [Message(role="user", content="hello")])
    except InvalidRequest as error:
        raise ArtifactError(f"{file}: {error}") from error


def _try_load(file: Path, context: int) -> None:
    """Load the file with llama.cpp and decode one step, whatever memory is free: the engine checks that."""
    import llama_cpp.llama_cpp as native

    from ..llama_cpp.native import bindings
    from ..llama_cpp.native.vocabulary import Vocabulary

    bindings.start_backend()
    model = native.llama_model_load_from_file(str(file).encode(), native.llama_model_default_params())
    if not model:
        raise ArtifactError(
            f"{file}: llama.cpp cannot load the file: {bindings.last_errors() or 'it does not say why'}"
        )
    params = native.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = min(context, _CHECK_CONTEXT_TOKENS), 1, 1
    pointer = native.llama_init_from_model(model, params)
    if not pointer:
        raise ArtifactError(f"{file}: llama.cpp cannot allocate a context of {params.n_ctx} tokens")
    ids = Vocabulary(model).encode("hello", special=True)
    tokens = (native.llama_token * max(1, len(ids)))(*ids)
    code = native.llama_decode(pointer, native.llama_batch_get_one(tokens, len(tokens)))
    if code:
        raise ArtifactError(f"{file}: llama_decode failed with code {code}")


def _examine_adapter(file: Path, model: Path) -> None:
    from ..llama_cpp.native.context import Context
    from ..llama_cpp.native.weights import Weights, load_adapter
    from ..llama_cpp.protocol import AdapterFile

    architecture = adapted_architecture(file)
    weights = Weights(model)
    if architecture != weights.architecture:
        raise ArtifactError(
            f"{file} is an adapter for {architecture} models, but {model} is a {weights.architecture} model"
        )
    adapter = load_adapter(weights, AdapterFile(file.stem, str(file)))
    context = Context(weights, kv_tokens=_CHECK_CONTEXT_TOKENS, sequences=1, batch_tokens=32, outputs=1, threads=1)
    context.use_adapter(adapter)
    context.warm_up(0)


def _examine_mmproj(file: Path, model: Path) -> None:
    from ..llama_cpp.native.mtmd import VisionEncoder

    read_mmproj(file)
    VisionEncoder(file, model, threads=1).encode(bytes(_SIDE * _SIDE * 3), _SIDE, _SIDE)


def _main() -> None:
    bound = int(os.environ["CAUSEWAY_CHECK_BYTES"])
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    file, context = Path(sys.argv[1]), int(sys.argv[2])
    # llama.cpp and the libraries under it may print: only the verdict goes to stdout.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        if len(sys.argv) > _MODEL:
            examine = _examine_mmproj if sys.argv[_KIND] == "mmproj" else _examine_adapter
            examine(file, Path(sys.argv[_MODEL]))
            verdict = _Verdict()
        else:
            verdict = _Verdict(gguf=_examine(file, context))
    except (EngineUnavailable, InvalidRequest) as error:
        verdict = _Verdict(fault=f"{file}: {error.message}" if isinstance(error, InvalidRequest) else error.message)
    except ArtifactError as error:
        verdict = _Verdict(fault=str(error))
    except ImportError as error:
        verdict = _Verdict(fault=f"{file}: cannot be checked without llama.cpp ({error}): {_INSTALL}")
    except MemoryError:
        verdict = _Verdict(
            fault=f"{file}: refused, because checking it needs more than {bound / GIB:.1f} GiB of memory"
        )
    with out:
        out.write(msgspec.json.encode(verdict))


if __name__ == "__main__":
    _main()
