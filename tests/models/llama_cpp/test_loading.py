"""Model files: broken ones are refused with a reason; loading and closing leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import pytest

from causeway_server.models.llama_cpp.engine import Engine
from causeway_server.models.llama_cpp.protocol import EngineOptions, Prompt
from causeway_server.router.errors import EngineUnavailable

from .conftest import Rig, chat
from .tiny_gguf import write_tiny_gguf

_TASKS = Path("/proc/self/task")  # a folder for each thread


def refusal(path: Path, **fields: object) -> str:
    engine = Engine(EngineOptions(model_path=str(path), threads=1, **fields), lambda emissions: None)  # type: ignore[arg-type]
    with pytest.raises(EngineUnavailable) as caught:
        engine.start()
    return caught.value.message


def test_our_build_multiplies_without_amx() -> None:
    """GCC 12.2 loses the tile configuration: the process ended within minutes on a processor that has AMX."""
    assert b"CPU" in llama_cpp.llama_print_system_info()
    assert b"AMX" not in llama_cpp.llama_print_system_info()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "no.gguf") == f"{tmp_path / 'no.gguf'}: No such file or directory"


def test_a_file_that_is_no_gguf_is_refused_with_its_first_bytes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"<html>not found</html>")
    assert "not a GGUF file (it begins with b'<htm')" in refusal(path)


def test_a_newer_format_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + (9).to_bytes(4, "little") + b"\0" * 64)
    assert "version 9 is newer" in refusal(path)


@pytest.mark.parametrize("kept", [0, 6, 200, 20_000, 100_000])
def test_a_truncated_file_is_refused(tmp_path: Path, tiny_model: Path, kept: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_model.read_bytes()[:kept])
    assert str(path) in refusal(path)


def test_noise_behind_a_good_header_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_model.read_bytes()[:64] + b"\xff" * 5000)
    assert "llama.cpp cannot load the file" in refusal(path)


def test_a_refusal_token_that_is_not_one_token_is_refused(tiny_model: Path) -> None:
    """A typing error in a manifest would silently raise every confidence."""
    assert "'hello hello' is 2 tokens" in refusal(tiny_model, refuse_token="hello hello")


def test_a_context_beyond_memory_is_refused(tiny_model: Path) -> None:
    assert "MB of KV cache" in refusal(tiny_model, kv_tokens=2**31 - 1)


def test_info_describes_the_model_and_its_limits(tiny_model: Path) -> None:
    rig = Rig(EngineOptions(model_path=str(tiny_model), threads=1, sequences=3))
    info = rig.engine.info
    rig.engine.close()
    assert (info.context_tokens, info.threads, info.embedding_dimensions) == (512, 1, 64)


def test_an_engine_can_be_closed_and_another_one_started(tiny_model: Path) -> None:
    """Also while answers are running; they end with an error."""
    for _ in range(3):
        rig = Rig(EngineOptions(model_path=str(tiny_model), threads=1, sequences=2))
        jobs = [rig.start("hello", max_tokens=None, ignore_eos=True) for _ in range(4)]
        rig.wait_for(lambda rig=rig, jobs=jobs: jobs[0] in rig.emissions)  # type: ignore[misc]
        rig.engine.close()
        assert {rig.answer(job).end.error or rig.answer(job).end.finish_reason for job in jobs} <= {
            "engine_unavailable",
            "length",
        }


def test_a_model_without_a_chat_template_gets_a_plain_one(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "bare.gguf", template=None)
    rig = Rig(EngineOptions(model_path=str(path), threads=1))
    written = Prompt(text="user: hello\nassistant:")
    assert rig.engine.count(chat("hello")) == rig.engine.count(written)
    assert rig.run(chat("hello")).end.error == ""
    rig.engine.close()


@pytest.mark.skipif(not _TASKS.is_dir(), reason="Linux counts threads there")
def test_loading_leaves_no_threads_of_its_own(tiny_model: Path) -> None:
    """Beside the engine's thread, those that help it decode (with more than cores, libgomp's sleep at barriers)."""
    first = Rig(EngineOptions(model_path=str(tiny_model)))
    first.run("hello", json_schema='{"const": 1}')  # llguidance's threads are the process's: from its first grammar on
    first.engine.close()
    before = set(_TASKS.iterdir())
    rig = Rig(EngineOptions(model_path=str(tiny_model), threads=2))
    rig.run("hello")
    assert len(set(_TASKS.iterdir()) - before) == rig.engine.info.threads
    rig.engine.close()
