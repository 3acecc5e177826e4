"""A model file of unknown origin is tried in a child process with bounded memory and time."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp")

from causeway_server.models.catalog.artifact import ArtifactError
from causeway_server.models.publish.check import CheckLimits, check_gguf, limits_for, require_llama_cpp
from tests.models.catalog.gguf_files import SHIPPED, STRING, changed_copy, text

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GIB = 2**30


def test_an_audio_clip_file_is_described() -> None:
    assert check_gguf(SHIPPED, 2048).architecture == "llama"


def test_llama_cpp_that_is_missing_or_broken_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing: before a download. Its import fails: by the child, which does not blame the file or the memory."""
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('libggml.so: no such file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ArtifactError, match=r"without llama\.cpp \(libggml\.so: no such file\): run `make setup`"):
        check_gguf(SHIPPED, 512)
    with pytest.raises(ArtifactError, match="missing: run `make setup`"):
        require_llama_cpp(find=lambda _: None)
    require_llama_cpp()


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{% for i in range(10**9) %}x{% endfor %}", "chat template"),
        ("{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}", "chat template"),
        ("{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "writes"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template"),
        ("{% include '/etc/passwd' %}", "chat template"),
        ("{{ messages | map('nope') }", "does not compile"),
    ],
)
def test_a_template_that_loops_or_reaches_out_is_refused(tmp_path: Path, template: str, complaint: str) -> None:
    file = changed_copy(tmp_path / "template.gguf", tokenizer__chat_template=template)
    with pytest.raises(ArtifactError, match=complaint):
        check_gguf(file, 512)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"llama__block_count": 4_000_000_000}, "refused|cannot load"),
        ({"llama__attention__head_count": 0}, "refused|cannot load"),
        ({"llama__embedding_length": 0}, "refused|cannot load"),
        ({"llama__rope__dimension_count": 4_000_000_000}, "refused|cannot load"),
        ({"llama__context_length": 0, "llama__block_count": 1}, "refused|cannot load"),
        ({"tokenizer__ggml__tokens": ["a", "b"]}, "refused|cannot load"),
        ({"tokenizer__ggml__token_type": [1]}, "refused|cannot load"),
        ({"tokenizer__ggml__model": "nonsense"}, "refused|cannot load"),
    ],
)
def test_a_network_that_llama_cpp_cannot_load_is_refused(
    tmp_path: Path, values: dict[str, object], complaint: str
) -> None:
    """Sizes and vocabularies that the weights do not have."""
    with pytest.raises(ArtifactError, match=complaint):
        check_gguf(changed_copy(tmp_path / "network.gguf", **values), 512)


@pytest.mark.parametrize("architecture", ["gemma", "bloom", "nope!"])
def test_weights_under_the_name_of_another_architecture_are_refused(tmp_path: Path, architecture: str) -> None:
    name = text("general.architecture") + struct.pack("<I", STRING)
    content = SHIPPED.read_bytes()
    assert name + text("llama") in content
    file = tmp_path / "mislabelled.gguf"
    file.write_bytes(content.replace(name + text("llama"), name + text(architecture), 1))
    with pytest.raises(ArtifactError, match=r"refused|cannot load"):
        check_gguf(file, 512)


def test_tokens_that_the_vocabulary_does_not_have_do_no_harm(tmp_path: Path) -> None:
    """Merges of unknown parts, and special tokens beyond the end: llama.cpp leaves them out."""
    values = {"tokenizer__ggml__eot_token_id": 4_000_000_000, "tokenizer__ggml__merges": ["no such", "é è", "x"]}
    assert check_gguf(changed_copy(tmp_path / "tokens.gguf", **values), 512).vocabulary == 3904


def test_a_check_that_exceeds_its_time_or_memory_is_a_refusal() -> None:
    with pytest.raises(ArtifactError, match="took longer than"):
        check_gguf(SHIPPED, 512, CheckLimits(memory_bytes=GIB, time_s=0.01))
    with pytest.raises(ArtifactError, match=r"memory|needs more|cannot"):
        check_gguf(SHIPPED, 512, CheckLimits(memory_bytes=GIB // 32, time_s=60))


def test_the_limits_grow_with_the_file() -> None:
    assert limits_for(8 * GIB).memory_bytes > limits_for(GIB).memory_bytes
    assert limits_for(8 * GIB).time_s > limits_for(GIB).time_s
