"""Text → sentences → clauses → the ids of a Piper voice, as Piper makes them."""

from __future__ import annotations

import shutil

import msgspec
import pytest

from causeway_server.edge_node.parts.speaker import Espeak
from causeway_server.models.parts.voices import (
    MAX_SENTENCE,
    Clause,
    VoiceSettings,
    phoneme_ids,
    split_clauses,
    split_sentences,
)

from .tiny_voice import IDS, settings

VOICE = msgspec.convert(settings(), VoiceSettings)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two!  Three?", ["One.", "Two!", "Three?"]),
        ('He said "stop." Then 3.5 left.', ['He said "stop."', "Then 3.5 left."]),
        ("a title\nand a line", ["a title", "and a line"]),
        ("你好。再见！", ["你好。", "再见！"]),
        (" \n\t ", []),
        ("", []),
    ],
)
def test_a_text_is_cut_into_sentences(text: str, sentences: list[str]) -> None:
    assert list(split_sentences(text)) == sentences


def test_a_sentence_without_end_is_cut_and_loses_nothing() -> None:
    words = " ".join(f"word{at}" for at in range(20_000))
    for text in (words, words.replace("9 ", "9, "), "x" * 100_000):
        pieces = list(split_sentences(text))
        assert max(map(len, pieces)) <= MAX_SENTENCE
        assert "".join("".join(pieces).split()) == "".join(text.split())


def test_a_sentence_is_cut_into_clauses_with_their_punctuation() -> None:
    found = list(split_clauses('Well, it is 3:45; "go (now)!"'))
    assert found == [Clause("Well,", ","), Clause("it is 3:45;", ";"), Clause('"go (now)!', "!")]
    assert list(split_clauses("你好，世界。")) == [Clause("你好，", ","), Clause("世界。", ".")]
    assert list(split_clauses("no end")) == [Clause("no end", "")]
    assert list(split_clauses("... -- , !")) == []
    assert list(split_clauses("🎉")) == [Clause("🎉", "")]  # espeak-ng knows its name


def test_ids_are_those_of_piper() -> None:
    """Start, pad, each symbol with a pad after it, end; marks stay, language flags and unknown symbols do not."""

    def number(symbols: str) -> tuple[int, ...]:
        return tuple(IDS[symbol][0] for symbol in symbols)

    assert phoneme_ids([("hi", "")], VOICE) == number("^_h_i_$")
    assert phoneme_ids([(" hi\n", ","), ("a b\nc", "?")], VOICE) == number("^_h_i_,_ _a_ _b_ _c_?_$")
    assert phoneme_ids([("(fr)b\u00e1(en-us)\u0250", ".")], VOICE) == number("^_b_a_\u0301_._$")  # decomposed
    assert phoneme_ids([("_^$a", "")], VOICE) == number("^_a_$")  # text is no control symbol
    for nothing in ([], [("", ".")], [("\u4e16", "!")]):
        assert phoneme_ids(nothing, VOICE) == ()


def test_symbols_of_several_code_points_are_found_where_the_voice_has_them() -> None:
    ids = {**IDS, "a\u026a": [90]}
    clustered = msgspec.convert(
        settings(phoneme_id_map=ids, num_symbols=91, vowel_clusters=[["a", "\u026a"]]), VoiceSettings
    )
    assert 90 in phoneme_ids([("ba\u026ab", "")], clustered)
    assert 90 not in phoneme_ids([("ba\u026ab", "")], VOICE)


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs espeak-ng")
async def test_the_program_writes_a_clause_in_ipa() -> None:
    import asyncio

    espeak = Espeak({"PATH": "/usr/bin:/usr/local/bin"})
    deadline = asyncio.get_running_loop().time() + 60.0
    assert "k\u02c8\u026at\u0283\u0259n" in await espeak.phonemes("turn on the kitchen lights", "en-us", deadline)
