"""A GGUF's header is believed only as far as the file bears it out."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.models.catalog.artifact import ArtifactError, find_artifact
from causeway_server.models.catalog.gguf import TYPES, describe, read_gguf, read_header

from .gguf_files import ARRAY, SHIPPED, STRING, header, network_header, pair, tensor, text

ARCHITECTURE = pair("general.architecture", "llama")
WEIGHTS = SHIPPED.read_bytes()
HUGE = 2**60

HOSTILE = {
    "empty": (b"", "it is truncated"),
    "another format": (b"PK\x03\x04" + bytes(60), "the file starts with b'PK"),
    "version": (header([], version=9), "version 9 of the format is not known"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big endian"),
    "pairs beyond the file": (
        header([ARCHITECTURE], counts=(0, HUGE)),
        r"bytes declares 1,152,921,504,606,846,976 key-value pairs",
    ),
    "tensors beyond the file": (
        header([ARCHITECTURE], counts=(HUGE, 1)),
        r"bytes declares 1,152,921,504,606,846,976 tensors",
    ),
    "a text beyond the file": (
        header([text("general.architecture") + struct.pack("<IQ", STRING, HUGE)]),
        "'general.architecture' takes 1,152,921,504,606,846,976 bytes, but the file ends at",
    ),
    "an array beyond the file": (
        header([text("general.tags") + struct.pack("<IIQ", ARRAY, 0, HUGE)]),
        "numbers in 'general.tags'",
    ),
    "strings beyond the file": (
        header([text("tokenizer.ggml.tokens") + struct.pack("<IIQ", ARRAY, STRING, HUGE)]),
        "strings in 'tokenizer.ggml.tokens'",
    ),
    "arrays in arrays": (
        header([text("general.tags") + struct.pack("<IIQ", ARRAY, ARRAY, 1) * 9]),
        "arrays hold numbers or strings",
    ),
    "a key twice": (header([ARCHITECTURE, ARCHITECTURE]), "the key 'general.architecture' occurs twice"),
    "an unknown type": (header([text("x") + struct.pack("<II", 77, 0)]), "'x' has the unknown type 77"),
    "no name": (header([text("") + struct.pack("<II", 4, 0)]), "a key has the invalid length of 0 bytes"),
    "a name that is no text": (header([text(b"\xff\xfe") + struct.pack("<II", 4, 0)]), "a key is not UTF-8"),
    "too many dimensions": (header([ARCHITECTURE], [tensor("w", [2] * 40)]), "has 40 dimensions"),
    "an unknown tensor type": (header([ARCHITECTURE], [tensor("w", [32], kind=999)]), "unknown type 999"),
    "rows that are no blocks": (header([ARCHITECTURE], [tensor("w", [33], kind=12)]), "not a multiple of 256"),
    "a tensor beyond the file": (header([ARCHITECTURE], [tensor("w", [HUGE])]), "the tensor 'w' ends at byte"),
    "a tensor far behind the file": (header([ARCHITECTURE], [tensor("w", [1], offset=HUGE)]), "it is truncated"),
    "alignment": (header([ARCHITECTURE, pair("general.alignment", 0)]), "general.alignment is 0"),
    "no architecture": (header([pair("general.name", "x")]), "`general.architecture` is missing"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_lie_in_the_header_is_refused_with_what_and_where(case: str, tmp_path: Path) -> None:
    content, complaint = HOSTILE[case]
    file = tmp_path / "hostile.gguf"
    file.write_bytes(content)
    with pytest.raises(ArtifactError) as refused:
        read_gguf(file)
    assert str(file) in str(refused.value)
    assert complaint in str(refused.value) or "the file is empty" in str(refused.value)


@given(length=st.integers(0, len(WEIGHTS) - 1))
def test_a_file_cut_anywhere_is_refused(length: int) -> None:
    with pytest.raises(ArtifactError):
        describe(WEIGHTS[:length], length, "cut.gguf")


@given(data=st.data())
def test_flipped_bytes_never_do_more_than_refuse(data: st.DataObject) -> None:
    """Whatever stands in the header: a description or an ArtifactError."""
    raw = bytearray(WEIGHTS[:4096])
    for _ in range(data.draw(st.integers(1, 8))):
        raw[data.draw(st.integers(0, 511))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ArtifactError):
        read_header(bytes(raw), len(WEIGHTS), "flipped.gguf")


def test_the_first_bytes_of_a_file_describe_the_network() -> None:
    """Of a download that has not begun; the weights are taken to fill the file."""
    whole = read_gguf(SHIPPED)
    first = describe(WEIGHTS[: len(network_header()) + 1024], len(WEIGHTS), "far away")
    for name in ("architecture", "layers", "kv_heads", "key_width", "value_width", "width", "context_length"):
        assert getattr(first, name) == getattr(whole, name)
    assert first.tensors_bytes == len(WEIGHTS)


def test_the_shipped_manifests_match_their_headers() -> None:
    for name in ("assistant", "assistant-large"):
        artifact = find_artifact(name)
        described = read_gguf(artifact.path)
        manifest = artifact.manifest
        assert (described.parameters, described.quantisation) == (manifest.parameters, manifest.quantisation)
        assert described.tokenizer_sha256 == manifest.tokenizer_sha256


def test_types_of_tensors_are_ggufs() -> None:
    """The package of llama.cpp knows the types of its release."""
    sizes = gguf.constants.GGML_QUANT_SIZES
    assert {kind.value: (kind.name, *sizes[kind]) for kind in gguf.GGMLQuantizationType if kind in sizes} == TYPES
