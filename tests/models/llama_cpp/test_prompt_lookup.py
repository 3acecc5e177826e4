"""Prompt-lookup speculation: answers are those without it, and drafts are made only where they pay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import pytest

from causeway_server.models.llama_cpp.engine import Engine
from causeway_server.models.llama_cpp.protocol import Emission, EngineOptions
from causeway_server.models.llama_cpp.scheduling.speculation import DraftPlanner, PromptLookup
from causeway_server.router.types import Sampling

from .conftest import Rig
from .scripted_drafts import plan_always

MakeRig = Callable[..., Rig]
PROMPT = "turn on the light in the kitchen and set the alarm for six " * 3
PLAIN_S = 0.04


class EveryDraft(DraftPlanner):
    """Drafts as much as it can."""

    plan = plan_always


@pytest.fixture(scope="module")
def speculating(tiny_options: EngineOptions) -> Iterator[Rig]:
    rig = Rig(msgspec.structs.replace(tiny_options, prompt_lookup=True), planner=EveryDraft())
    yield rig
    rig.engine.close()


def planner_of(engine: Engine) -> DraftPlanner:
    assert engine.core.planner is not None
    return engine.core.planner


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0.0), Sampling(temperature=0.7, seed=11), Sampling(temperature=0.0, frequency_penalty=0.3)],
    ids=["greedy", "seeded", "penalised"],
)
def test_answers_are_those_without_speculation(rig: Rig, speculating: Rig, sampling: Sampling) -> None:
    fields = {"max_tokens": 60, "ignore_eos": True, "sampling": sampling, "logprobs": 1}
    plain, drafted = rig.run(PROMPT, **fields), speculating.run(PROMPT, **fields)
    assert drafted.text == plain.text
    assert (drafted.tokens, drafted.end.finish_reason) == (60, "length")
    np.testing.assert_allclose(
        [one.logprob for one in drafted.logprobs], [one.logprob for one in plain.logprobs], atol=1e-3
    )


def test_accepted_drafts_save_steps(speculating: Rig) -> None:
    planner, steps = planner_of(speculating.engine), speculating.engine.stats().steps
    accepted = planner.accepted
    assert speculating.run(PROMPT, max_tokens=80, ignore_eos=True).end.completion_tokens == 80
    assert 0 < planner.accepted - accepted < planner.drafted
    assert speculating.engine.stats().steps - steps < 80


def test_streams_together_end_as_alone(rig: Rig, speculating: Rig) -> None:
    prompts = [PROMPT, "hello world " * 8, "play some music " * 6, "time"]
    alone = [rig.run(prompt, max_tokens=50, ignore_eos=True).text for prompt in prompts]
    jobs = speculating.between_steps(
        lambda: [speculating.start(prompt, max_tokens=50, ignore_eos=True) for prompt in prompts]
    )
    assert [speculating.answer(job).text for job in jobs] == alone


def test_stop_strings_and_limits_hold_inside_a_draft(rig: Rig, speculating: Rig) -> None:
    text = rig.run(PROMPT, max_tokens=40, ignore_eos=True).text
    stop = text[len(text) // 2 :][:6]
    for limit in (1, 2, 3, 17):
        answer = speculating.run(PROMPT, max_tokens=limit, ignore_eos=True)
        assert answer.end.completion_tokens == limit
    stopped = speculating.run(PROMPT, max_tokens=40, ignore_eos=True, stop=(stop,))
    assert (stopped.text, stopped.end.finish_reason) == (text[: text.index(stop)], "stop")


def test_cancelled_and_crowded_streams_leave_no_cells(tiny_options: EngineOptions, make_rig: MakeRig) -> None:
    """The cache is so small that streams are preempted while others speculate."""
    rig = make_rig(kv_tokens=160, context_tokens=160, prefix_cache_bytes=0, prompt_lookup=True, planner=EveryDraft())
    cancelled = rig.between_steps(lambda: [rig.start(PROMPT, max_tokens=100, ignore_eos=True)])[0]

    def cancel(emissions: list[Emission]) -> None:
        if planner_of(rig.engine).drafted:
            rig.engine.cancel(cancelled)

    rig.on_step = cancel
    assert rig.answer(cancelled).end.error == "client_gone"
    jobs = rig.between_steps(lambda: [rig.start(f"hello {n}", max_tokens=70, ignore_eos=True) for n in range(3)])
    assert [rig.answer(job).end.completion_tokens for job in jobs] == [70] * 3
    assert rig.engine.stats().kv_used == 0


# --- when to draft ----------------------------------------------------------------------------------------------------


class Stream:
    """A sequence whose next tokens are scripted."""

    remaining = 1000

    def __init__(self, prompt: Sequence[int]) -> None:
        self.forced: list[int] = []
        self.lookup: PromptLookup | None = PromptLookup(np.array(prompt, np.int32))


def play(prompt: Sequence[int], answer: Sequence[int], cost: Callable[[int], float]) -> float:
    """Let a scripted model give `answer`; return its time as a share of that without speculation."""
    stream, planner, at, spent = Stream(prompt), DraftPlanner(), 0, 0.0
    assert stream.lookup is not None
    while at < len(answer):
        drafts = planner.plan([stream], 16)
        tokens = drafts[0].tokens if drafts else []
        spent += cost(1 + len(tokens))
        planner.record(1 + len(tokens), cost(1 + len(tokens)))
        made = 1
        while made <= len(tokens) and at + made < len(answer) and tokens[made - 1] == answer[at + made - 1]:
            made += 1
        for token in answer[at : at + made]:
            stream.lookup.append(token)
        at += made
    return spent / (len(answer) * cost(1))


def rows_cost(rows: int) -> float:
    """Measured on a small model: rows in blocks of four are cheap, others nearly as dear as steps."""
    return PLAIN_S * (1 + 0.4 * (rows // 4) + 0.7 * (rows % 4 if rows > 1 else 0))


def test_a_repeated_text_is_drafted() -> None:
    text = list(np.random.default_rng(5).integers(0, 500, 200))
    changed = [*text[:90], 501, *text[91:]]
    assert play(text, changed, rows_cost) < 0.6


def test_new_text_is_not_drafted() -> None:
    draw = np.random.default_rng(6)
    assert play(list(draw.integers(0, 12, 300)), list(draw.integers(0, 12, 600)), rows_cost) < 1.02


def test_nothing_is_drafted_where_rows_cost_as_much_as_steps() -> None:
    text = list(np.random.default_rng(7).integers(0, 500, 300))
    assert play(text, text, lambda rows: PLAIN_S * rows) < 1.1


def test_a_lookup_follows_a_source_that_was_right() -> None:
    """The gram 1 2 3 occurs twice; the place that predicted right so far goes on predicting."""
    lookup = PromptLookup(np.array([7, 8, 9, 1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 8, 9], np.int32))
    for token in (1, 2, 3):
        lookup.append(token)
    assert lookup.draft(2) == [4, 5]
    assert PromptLookup(np.array([1, 2], np.int32)).draft(4) == []
