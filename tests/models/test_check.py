"""A model file of unknown origin is tried in a child process with bounded memory and time."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("llama_cpp")

from models.catalog.artifact import ArtifactError
from models.publish.check import CheckLimits, check_gguf, limits_for

from .gguf_files import SHIPPED, changed_copy

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GIB = 2**30


def test_a_sound_file_is_described() -> None:
    assert check_gguf(SHIPPED, 2048).architecture == "llama"


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
    ],
)
def test_a_network_that_llama_cpp_cannot_load_is_refused(
    tmp_path: Path, values: dict[str, int], complaint: str
) -> None:
    with pytest.raises(ArtifactError, match=complaint):
        check_gguf(changed_copy(tmp_path / "network.gguf", **values), 512)


def test_a_check_that_exceeds_its_time_or_memory_is_a_refusal() -> None:
    with pytest.raises(ArtifactError, match="took longer than"):
        check_gguf(SHIPPED, 512, CheckLimits(memory_bytes=GIB, time_s=0.01))
    with pytest.raises(ArtifactError, match=r"memory|needs more|cannot"):
        check_gguf(SHIPPED, 512, CheckLimits(memory_bytes=GIB // 32, time_s=60))


def test_the_limits_grow_with_the_file() -> None:
    assert limits_for(8 * GIB).memory_bytes > limits_for(GIB).memory_bytes
    assert limits_for(8 * GIB).time_s > limits_for(GIB).time_s
