"""A thought ends at its budget, from a model of random weights that would never end it."""

from __future__ import annotations

from pathlib import Path

import pytest

from causeway_server.models.chat.template import thinking_of
from causeway_server.models.llama_cpp.protocol import EngineOptions, Prompt
from causeway_server.router.types import Message, Sampling
from tests.models.chat.family_templates import CHATML

from ..conftest import GREEDY, Rig
from ..tiny_gguf import write_tiny_gguf

END = "\n</think>\n\n"
USER = (Message("user", "hello"),)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=3)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("budget", [0, 5])
def test_the_end_mark_comes_at_the_budget(rig: Rig, budget: int, sampling: Sampling) -> None:
    """The model goes on after it, with its usual limit; without a budget the text is the model's own."""
    fields = {"sampling": sampling, "max_tokens": 40}
    own = rig.run("hello", **fields)
    bounded = rig.run("hello", thinking="open", thinking_tokens=budget, **fields)
    thought, mark, answer = bounded.text.partition(END)
    assert mark
    assert answer
    assert bounded.end.completion_tokens == own.end.completion_tokens
    assert own.text.startswith(thought)
    assert rig.run("hello", thinking="open", **fields).text == own.text or sampling is not GREEDY


def test_an_answer_without_a_thought_is_left_alone(rig: Rig) -> None:
    own = rig.run("hello", max_tokens=20)
    assert rig.run("hello", thinking="marked", thinking_tokens=0, max_tokens=20).text == own.text


def test_the_template_shows_how_a_model_thinks() -> None:
    assert thinking_of(CHATML) == ""
    assert thinking_of(CHATML + "<think>\n") == ""  # never ended: not a mark of thoughts
    assert thinking_of(CHATML + "{# </think> #}") == "marked"
    assert thinking_of(CHATML + "{# </think> #}<think>\n") == "open"
    assert thinking_of("{{ raise_exception('no') }}</think>") == "marked"


def test_a_prompt_can_end_in_the_beginning_of_the_answer(tmp_path: Path) -> None:
    rig = Rig(EngineOptions(model_path=str(write_tiny_gguf(tmp_path / "m.gguf"))))
    try:
        prompts = rig.engine.core.prompts
        plain, closed = Prompt(messages=USER), Prompt(messages=USER, answer_start=END)
        tokens = prompts.tokens(closed).tolist()
        assert tokens[: len(prompts.tokens(plain))] == prompts.tokens(plain).tolist()
        assert rig.engine.core.vocabulary.decode(tokens).endswith(END)
    finally:
        rig.engine.close()
