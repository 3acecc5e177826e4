"""`suffix`: a model that has tokens for filling in the middle reads prompt and suffix between them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from causeway_server.models.llama_cpp.protocol import EngineOptions, Prompt

from .conftest import Rig
from .tiny_gguf import write_tiny_gguf

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")  # llama.cpp knows them by these names


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    model = write_tiny_gguf(tmp_path_factory.mktemp("middle") / "tiny.gguf", marks=MARKS)
    rig = Rig(EngineOptions(model_path=str(model), threads=1, sequences=4, prompt_lookup=False))
    yield rig
    rig.engine.close()


def tokens(rig: Rig, prompt: Prompt) -> list[int]:
    return rig.engine.core.prompts.tokens(prompt).tolist()


@pytest.mark.parametrize("suffix", ["the light", ""])
def test_the_prompt_stands_before_the_suffix_and_the_answer_s_place_last(rig: Rig, suffix: str) -> None:
    framed = f"{MARKS[0]}turn on{MARKS[1]}{suffix}{MARKS[2]}"
    expected = tokens(rig, Prompt(text=framed, parse_special=True))
    assert tokens(rig, Prompt(text="turn on", suffix=suffix)) == expected
    ids = tuple(tokens(rig, Prompt(text="turn on")))
    assert tokens(rig, Prompt(tokens=ids, suffix=suffix)) == expected


def test_marks_in_a_caller_s_words_are_text(rig: Rig) -> None:
    framed = tokens(rig, Prompt(text=f"turn {MARKS[2]}", suffix=f"on {MARKS[0]}"))
    marks = [tokens(rig, Prompt(text=mark, parse_special=True))[0] for mark in MARKS]
    assert [framed.count(mark) for mark in marks] == [1, 1, 1]


def test_an_answer_is_generated(rig: Rig) -> None:
    answer = rig.run(Prompt(text="turn on", suffix="the light"), max_tokens=3, ignore_eos=True)
    assert (answer.end.completion_tokens, answer.end.error) == (3, "")


def test_a_model_without_such_tokens_refuses_by_name(tiny_options: EngineOptions) -> None:
    rig = Rig(tiny_options)
    try:
        refused = rig.run(Prompt(text="turn on", suffix="the light")).end
    finally:
        rig.engine.close()
    assert (refused.error, refused.param) == ("unsupported_feature", "suffix")
    assert refused.detail.startswith("`suffix`: ")
