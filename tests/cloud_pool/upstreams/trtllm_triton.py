"""A real Triton with stand-ins for TensorRT-LLM's models, and for one of Triton's vLLM backend that sees.

`python -m tests.cloud_pool.upstreams.trtllm_triton PORT PORT`.

Their configurations have the names, types and dimensions that NVIDIA publishes (github.com/NVIDIA/TensorRT-LLM, below
triton_backend/all_models), and those that the vLLM backend completes (triton-inference-server/vllm_backend,
src/model.py). A Triton refuses an input that its model's configuration does not name.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from causeway_server.cloud_pool.cli.process import until_stopped
from causeway_server.cloud_pool.cli.triton import ENVIRONMENT
from causeway_server.cloud_pool.triton_server.launcher import Launcher, ServerCommand
from causeway_server.cloud_pool.triton_server.server_process import (
    Ports,
    clear_orphans,
    command,
    find_environment,
    memory_prefix,
)
from causeway_server.cloud_pool.upstreams.triton.model_control import default_key_file, ensure_key
from tests.ports import free_port
from tests.stack import Process

ROOT = Path(__file__).parents[3]
MODELS = ("ensemble", "tensorrt_llm", "vision")
_MODEL = Path(__file__).parent / "models" / "trtllm.py"
_FLOATS = ("top_p", "temperature", "presence_penalty", "frequency_penalty")
_ENSEMBLE = {
    "text_input": "STRING",
    "max_tokens": "INT32",
    **dict.fromkeys(("num_return_sequences", "end_id", "pad_id", "top_k", "min_tokens", "beam_width"), "INT32"),
    **dict.fromkeys((*_FLOATS, "length_penalty", "repetition_penalty"), "FP32"),
    **dict.fromkeys(("stop_words[]", "bad_words[]", "embedding_bias_words[]"), "STRING"),
    **dict.fromkeys(("guided_decoding_guide_type", "guided_decoding_guide", "decoder_text_input"), "STRING"),
    **dict.fromkeys(("seed", "lora_task_id"), "UINT64"),
    **dict.fromkeys(
        ("stream", "exclude_input_in_output", "return_log_probs", "return_perf_metrics", "return_context_logits"),
        "BOOL",
    ),
    **dict.fromkeys(("return_num_input_tokens", "return_num_output_tokens"), "BOOL"),
}
_LLM_API = {
    "text_input[]": "STRING",
    "image_url[]": "STRING",
    **dict.fromkeys(("sampling_param_best_of", "sampling_param_top_k", "sampling_param_max_tokens"), "INT32"),
    **{f"sampling_param_{name}": "FP32" for name in _FLOATS},
    "sampling_param_stop[]": "STRING",
    **dict.fromkeys(("sampling_param_seed", "lora_id"), "UINT64"),
    **dict.fromkeys(("sampling_param_exclude_input_from_output", "sampling_param_return_perf_metrics"), "BOOL"),
    **dict.fromkeys(("streaming", "return_finish_reason", "return_stop_reason", "return_cumulative_logprob"), "BOOL"),
    "stop": "BOOL",
}
_VLLM = {
    **dict.fromkeys(("text_input", "image[]", "sampling_parameters"), "STRING"),
    **dict.fromkeys(("stream", "exclude_input_in_output", "return_finish_reason", "return_cumulative_logprob"), "BOOL"),
    **dict.fromkeys(("return_logprobs", "return_num_input_tokens", "return_num_output_tokens"), "BOOL"),
}
_REQUIRED = ("text_input", "max_tokens")
_OUTPUTS = {
    "ensemble": {"text_output[]": "STRING", "num_input_tokens": "INT32", "num_output_tokens": "INT32"},
    "tensorrt_llm": {"text_output[]": "STRING", "finish_reason[]": "STRING"},
    "vision": {
        **dict.fromkeys(("text_output[]", "finish_reason[]", "logprobs[]"), "STRING"),
        "cumulative_logprob[]": "FP32",
        **dict.fromkeys(("num_input_tokens", "num_output_tokens[]"), "UINT32"),
    },
}


def _tensor(name: str, datatype: str, *, optional: bool) -> str:
    dims = -1 if name.endswith("[]") else 1
    more = " optional: true" if optional else ""
    return f'{{ name: "{name.removesuffix("[]")}" data_type: TYPE_{datatype} dims: [ {dims} ]{more} }}'


def write_repository(folder: Path) -> None:
    for model, inputs, batch in (("ensemble", _ENSEMBLE, 8), ("tensorrt_llm", _LLM_API, 0), ("vision", _VLLM, 0)):
        required = [name for name in inputs if name.removesuffix("[]") in _REQUIRED]
        takes = ",\n".join(_tensor(name, kind, optional=name not in required) for name, kind in inputs.items())
        gives = ",\n".join(_tensor(name, kind, optional=False) for name, kind in _OUTPUTS[model].items())
        (folder / model / "1").mkdir(parents=True)
        (folder / model / "config.pbtxt").write_text(
            f'name: "{model}"\nbackend: "python"\nmax_batch_size: {batch}\ninput [\n{takes}\n]\noutput [\n{gives}\n]\n'
            "model_transaction_policy { decoupled: true }\ninstance_group [ { count: 1 kind: KIND_CPU } ]\n"
        )
        (folder / model / "1" / "model.py").write_text(_MODEL.read_text())


class TrtllmTriton:
    """The process."""

    def __init__(self, folder: Path) -> None:
        self.port, metrics_port = free_port(), free_port()
        argv = [sys.executable, "-m", "tests.cloud_pool.upstreams.trtllm_triton", str(self.port), str(metrics_port)]
        self.process = Process("trtllm", argv, folder / "trtllm.log", {"PYTHONPATH": str(ROOT)})

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


def main() -> None:
    environment = find_environment(Path(os.environ.get("CAUSEWAY_TRITON_ENV", ENVIRONMENT)))
    clear_orphans()
    prefix, key = memory_prefix(os.getpid()), ensure_key(default_key_file())
    ports = Ports(grpc=int(sys.argv[1]), metrics=int(sys.argv[2]))
    with tempfile.TemporaryDirectory(prefix="causeway-trtllm-") as folder:
        write_repository(Path(folder))
        launcher = Launcher(
            ServerCommand(
                argv=command(environment, Path(folder), MODELS, ports, drain_s=1.0, prefix=prefix, key=key),
                environ=environment.environ(os.environ),
                ports=ports,
                memory_prefix=prefix,
            ),
            drain_s=1.0,
            restart=False,
            print_ready=lambda line: print(line, flush=True),
            log=lambda line: print(f"triton: {line}", file=sys.stderr, flush=True),
        )
        status = until_stopped(launcher.run)
    sys.exit(status)


if __name__ == "__main__":
    main()
