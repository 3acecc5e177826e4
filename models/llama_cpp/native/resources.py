"""The resources that a model may use on this machine: memory for tokens, layers on the GPUs, and threads.

The KV cache has as many tokens as are configured, the model supports and memory allows. As many layers are offloaded as
fit into the free memory of the GPUs that this build of llama.cpp can use. Listing the GPUs takes memory on each until
the process ends: `probe_gpus` therefore asks a child, and importing this module loads nothing of llama.cpp.

At first a step uses as many threads as there are idle cores, then the number that trials found best. llama.cpp's
threads meet at a barrier many times in each step; a thread that waits for its core stops all of them, so one thread too
many costs far more than one too few. No load figure predicts the gain of one more thread, so it is tried.

python -m causeway_server.models.llama_cpp.native.resources      prints the GPUs as JSON
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import psutil

from causeway_server.router.errors import EngineUnavailable

from ...catalog.artifact import ArtifactError
from ...child_process import child_command, child_environment
from ..protocol import EngineOptions, KVType

_TIMEOUT_S = 30.0
_GPU_FILES = (Path("/dev/nvidia0"), Path("/etc/nv_tegra_release"))  # NVIDIA's driver; JetPack
log = logging.getLogger(__name__)
_GPU, _INTEGRATED = 1, 2  # ggml-backend.h, enum ggml_backend_dev_type
_USABLE = 0.9  # of the free memory
_BUFFER_BYTES = 512 * 1024 * 1024  # activations, logits and what the driver takes


class Gpu(msgspec.Struct, frozen=True):
    """A GPU, whose memory may be shared with the rest of the machine."""

    name: str
    description: str
    free_bytes: int
    total_bytes: int


class GpuReport(msgspec.Struct, frozen=True):
    """The GPUs that llama.cpp can use, and the backends that it was compiled for, such as CUDA and CPU."""

    gpus: tuple[Gpu, ...] = ()
    backends: tuple[str, ...] = ()


def has_nvidia_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU, according to its driver or JetPack."""
    return any(path.exists() for path in _GPU_FILES)


def probe_gpus() -> GpuReport:
    """Ask this environment's llama.cpp in a child process; return an empty report if it cannot be loaded."""
    try:
        child = subprocess.run(
            child_command("causeway_server.models.llama_cpp.native.resources"),
            env=child_environment(),
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        return msgspec.json.decode(child.stdout.splitlines()[-1], type=GpuReport)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError, IndexError):
        return GpuReport()


def list_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that llama.cpp finds; none for a build without a GPU backend."""
    count, get = _bind("ggml_backend_dev_count", [], ctypes.c_size_t), _bind("ggml_backend_dev_get", [ctypes.c_size_t])
    return tuple(gpu for index in range(count()) if (gpu := _describe(get(index))) is not None)


def list_backends() -> tuple[str, ...]:
    """Return the backends that llama.cpp was compiled for, with or without a device for them."""
    count, get = _bind("ggml_backend_reg_count", [], ctypes.c_size_t), _bind("ggml_backend_reg_get", [ctypes.c_size_t])
    return tuple(_text("ggml_backend_reg_name", get(index)) for index in range(count()))


def _bind(name: str, arguments: list[type], result: type | None = ctypes.c_void_p) -> Callable[..., Any]:
    """Return a function of ggml, imported at the call, as that loads llama.cpp and searches for devices."""
    from llama_cpp import _ggml

    from . import bindings

    bindings.start_backend()
    function = _ggml.libggml[name]
    function.argtypes, function.restype = arguments, result
    bound: Callable[..., Any] = function
    return bound


def _text(name: str, of: int) -> str:
    return (_bind(name, [ctypes.c_void_p], ctypes.c_char_p)(of) or b"").decode(errors="replace")


def _describe(device: int) -> Gpu | None:
    if _bind("ggml_backend_dev_type", [ctypes.c_void_p], ctypes.c_int)(device) not in (_GPU, _INTEGRATED):
        return None
    size = ctypes.POINTER(ctypes.c_size_t)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    memory = _bind("ggml_backend_dev_memory", [ctypes.c_void_p, size, size], None)
    memory(device, ctypes.byref(free), ctypes.byref(total))
    name, description = (_text(f"ggml_backend_dev_{field}", device) for field in ("name", "description"))
    return Gpu(name, description, free.value, total.value)


def choose_layers(options: EngineOptions) -> int:
    """Return the layers to offload: as configured, or for `auto` as many as fit into the free memory of all GPUs."""
    if options.gpu_layers != "auto":
        return options.gpu_layers
    gpus = list_gpus()
    if not gpus:
        return 0
    try:
        sizes = layer_bytes(options)
    except ArtifactError as error:
        log.warning("No layer is offloaded to a GPU: %s.", error)  # loading the file says more
        return 0
    layers = fitting_layers(sizes, sum(gpu.free_bytes for gpu in gpus))
    names = ", ".join(f"{gpu.name} ({gpu.description})" for gpu in gpus)
    log.info("%d of %d layers are offloaded to %s.", layers, len(sizes), names)
    return layers


def layer_bytes(options: EngineOptions) -> list[int]:
    """Return each layer's bytes on a GPU, with its KV cache; the last is the output layer. Raises ArtifactError."""
    # Imported on a machine with a GPU only: it takes time and memory.
    from ...catalog.gguf import read_layers

    gguf, blocks, output = read_layers(Path(options.model_path))
    tokens = wanted_kv_tokens(options, gguf.context_length)
    of_token = gguf.kv_heads * (gguf.key_width + gguf.value_width) * KV_BYTES[options.kv_type]
    return [*(block + int(tokens * of_token) for block in blocks), output]


def fitting_layers(sizes: Sequence[int], free_bytes: int) -> int:
    """Return how many layers of `sizes` (bytes, in order) fit, from the last one on, as llama.cpp offloads them."""
    room = int(free_bytes * _USABLE) - _BUFFER_BYTES
    return sum(1 for needed in itertools.accumulate(reversed(sizes)) if needed <= room)


_CGROUP = Path("/sys/fs/cgroup")
_KV_SHARE = 0.4  # of the free memory that the KV cache may take; the rest is for the system and other programs
_DEFAULT_KV_TOKENS = 16384  # for all sequences, unless one context is longer or more are configured
_MIN_CONTEXT = 256  # a shorter context is of no use
_MB = 1024 * 1024
_MIN_PREFIX_BYTES = 64 * _MB
Q8_BLOCK, Q8_BLOCK_BYTES = 32, 34  # ggml-common.h, block_q8_0: 32 values and a scale
KV_BYTES: dict[KVType, float] = {"f16": 2.0, "q8_0": Q8_BLOCK_BYTES / Q8_BLOCK}  # of one value


class MemoryPlan(msgspec.Struct, frozen=True):
    """The chosen sizes, which fit this machine."""

    context_tokens: int  # tokens of one sequence
    kv_tokens: int  # tokens of all sequences together
    prefix_bytes: int  # memory for prefixes of finished sequences


def free_bytes() -> int:
    """Return the memory that this process may still take: the machine's, or its cgroup's if that is less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit) - int((_CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return max(0, free)


def check_weights_fit(path: Path, size_bytes: int, free: int) -> None:
    """Check that the weights fit in `free` bytes. Raises EngineUnavailable: they do not."""
    if size_bytes > free:
        raise EngineUnavailable(
            f"{path}: the model needs {size_bytes // _MB} MB, but only {free // _MB} MB of memory are free. Free some "
            "memory, or use a smaller model."
        )


def plan_memory(
    options: EngineOptions, trained_context: int, kv_bytes_per_token: int, weights_bytes: int, free: int
) -> MemoryPlan:
    """Choose the sizes: (1) configured values, else (2) the model's own context, (3) reduced to fit memory.

    `trained_context`: the model's own, in tokens; `weights_bytes`: for the message. Raises EngineUnavailable if the
    configured sizes, or the shortest useful context, do not fit in `free` bytes.
    """
    affordable = int(free * _KV_SHARE) // max(1, kv_bytes_per_token)
    context = _wanted_context(options, trained_context)  # (1), (2)
    configured = options.context_tokens or options.kv_tokens
    if not configured:
        context = max(min(context, affordable), min(_MIN_CONTEXT, trained_context))  # (3)
    total = wanted_kv_tokens(options, context)
    needed = total if options.kv_tokens else min(total if configured else _MIN_CONTEXT, context)
    if needed * kv_bytes_per_token > free * (1.0 if configured else _KV_SHARE):
        raise EngineUnavailable(
            f"A context of {needed} tokens needs {needed * kv_bytes_per_token // _MB} MB of KV cache beside "
            f"{weights_bytes // _MB} MB of weights, but only {free // _MB} MB of memory are free. Set "
            "engine.context_tokens lower, or use a smaller model."
        )
    if not options.kv_tokens:
        total = max(min(total, affordable), needed)
    wanted = options.prefix_cache_bytes
    if wanted is None:  # a conversation that fills the context is found again in its next turn
        wanted = max(_MIN_PREFIX_BYTES, total * kv_bytes_per_token)
    return MemoryPlan(context_tokens=min(context, total), kv_tokens=total, prefix_bytes=min(wanted, free // 8))


def wanted_kv_tokens(options: EngineOptions, trained_context: int) -> int:
    """Return the KV cells of all sequences together, if there is enough memory."""
    context = _wanted_context(options, trained_context)
    return options.kv_tokens or max(context, min(context * options.sequences, _DEFAULT_KV_TOKENS))


def _wanted_context(options: EngineOptions, trained_context: int) -> int:
    return min(options.context_tokens or trained_context, trained_context)


_WINDOW_S = 0.1
_STEPS = 4  # on each side of a trial
_GAIN = 1.05  # a larger count must be this much faster
_HOPELESS = 1.5  # the second trial step that takes so many times longer ends the trial; one alone may be an accident
_PRICE = 200.0  # seconds of work between trials for each second that a trial lost
_PAUSE_S, _MAX_PAUSE_S = 1.0, 30.0  # of work between trials


def allowed_cores() -> float:
    """Return the cores that CPU affinity and the cgroup's quota leave to this process."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return min(cores, cgroup_quota(_CGROUP / "cpu.max"))


def cgroup_quota(path: Path) -> float:
    """Read cgroup v2's `cpu.max` ("max 100000" or "150000 100000") as cores; infinite without a limit."""
    try:
        quota, period = path.read_text().split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return float("inf")


def busy_cores() -> float:
    """Measure for a moment how many of the allowed cores are busy, with work of any process."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    loads = psutil.cpu_percent(interval=_WINDOW_S, percpu=True)
    return sum(load for core, load in enumerate(loads) if core in allowed) / 100


def choose_threads(requested: int, allowed: float | None = None, busy: float | None = None) -> int:
    """Choose the number of decoding threads, at least 1.

    Args:
        requested: The configured number, cut to the allowed cores; 0: the idle cores less one, which is the daemon's.
        allowed, busy: Cores that this process may use, and cores in use; None: measured.
    """
    allowed = allowed_cores() if allowed is None else allowed
    if requested > 0:
        return max(1, min(requested, round(allowed)))
    free = allowed - (busy_cores() if busy is None else busy)
    physical = psutil.cpu_count(logical=False) or round(allowed)
    # A core that is a quarter busy still counts as free: the sample includes this process's own start.
    return max(1, min(int(free + 0.25) - 1, physical))


class ThreadTuner:
    """Chooses by trials the number of threads for steps of one kind.

    `threads`: for the next step, which is recorded. `best`: so far, for steps that are not. `settled`: a trial was
    decided, or there are too few cores for a choice.
    """

    def __init__(self, first: int, most: Callable[[], float] | None) -> None:
        """Begin with `first` threads.

        `most` returns the number of cores before each trial, as a process may lose some; None: it is constant.
        """
        self.threads = self.best = first
        self.settled = most is None
        self._most = most
        self._upwards = True
        self._rows = -1
        self._reference = 0.0  # cost of a step with the best count
        self._costs: list[float] = []  # of this side of the trial
        self._trial_s = self._pause_s = 0.0
        self._refused = 0  # trials of more threads that were lost since the count last changed

    def record(self, rows: int, cost: float, step_s: float) -> None:
        """Record a step that ran with `threads`; only steps with as many answer rows are compared, by `cost`."""
        if self._most is None:
            return
        if rows != self._rows:
            self._rows = rows
            self._end_trial()
        if self._pause_s > 0:
            self._pause_s -= step_s
            return
        self._costs.append(cost)
        if self.threads == self.best:
            if len(self._costs) == _STEPS:
                self._begin_trial(median(self._costs), max(1, int(self._most())))
            return
        self._trial_s += step_s
        hopeless = sum(one > _HOPELESS * self._reference for one in self._costs) > 1
        if hopeless or len(self._costs) == _STEPS:
            self._decide(median(self._costs))

    def _begin_trial(self, reference: float, most: int) -> None:
        self._costs.clear()
        if self.best > most or most == 1:
            self.settled = True
            self.threads = self.best = min(self.best, most)
            self._pause_s = _PAUSE_S
            return
        self._reference = reference
        if self.best == most:
            self._upwards = False
        elif self.best == 1:
            self._upwards = True
        self.threads = min(most, self.best * 2) if self._upwards else max(1, self.best // 2)

    def _decide(self, cost: float) -> None:
        won = cost * _GAIN < self._reference if self._upwards else cost <= self._reference * _GAIN
        self.settled = True
        lost_s = max(0.0, self._trial_s * (1 - self._reference / cost))
        if won:
            self.best = self.threads
            self._pause_s = _PAUSE_S
            self._refused = 0
        else:
            self._pause_s = min(max(_PAUSE_S, lost_s * _PRICE), _MAX_PAUSE_S)
            if self._upwards:
                self._refused += 1
                self._pause_s = min(self._pause_s, _PAUSE_S * 2**self._refused)
            self._upwards = not self._upwards
        self._end_trial()

    def _end_trial(self) -> None:
        self.threads = self.best
        self._trial_s = 0.0
        self._costs.clear()


class TunersBySize:
    """A tuner per step size, by powers of 2 (1 row, 2 to 3, 4 to 7, …), with others for steps with prompts."""

    def __init__(self, first: int, most: Callable[[], float] | None) -> None:
        """Begin with `first` threads; the arguments are those of each tuner."""
        self._first = first
        self._most = most
        self._tuners: dict[tuple[bool, int], ThreadTuner] = {}  # by (with a prompt, bits of the number of rows)

    def tuner(self, rows: int, *, prompt: bool = False) -> ThreadTuner:
        """Return the tuner for steps with this number of rows. `prompt`: some of them belong to prompts, which is more
        work.

        Until its first trial is decided, it starts with the highest thread count of tuners of smaller steps.
        """
        size = (prompt, rows.bit_length())
        tuner = self._tuners.get(size)
        if tuner is None or not tuner.settled:
            first = max((other.best for one, other in self._tuners.items() if one < size), default=self._first)
            if tuner is None or tuner.best < first:
                tuner = self._tuners[size] = ThreadTuner(first, self._most)
        return tuner


if __name__ == "__main__":
    print(msgspec.json.encode(GpuReport(list_gpus(), list_backends())).decode())
