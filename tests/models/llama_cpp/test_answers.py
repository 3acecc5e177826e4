"""One job at a time: every option of a job has its effect."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest

from causeway_server.models.llama_cpp.protocol import Prompt
from causeway_server.router.types import Sampling

from .conftest import GREEDY, Rig, chat
from .tiny_gguf import CONTROL

END, REFUSE = CONTROL.index("<|end|>"), CONTROL.index("<|refuse|>")


def exactly(text: str) -> str:
    """Return a grammar that allows this text alone, which a model of random weights then generates."""
    return f"start: {json.dumps(text, ensure_ascii=False)}"


def bias(*pairs: tuple[int, float]) -> Sampling:
    return Sampling(temperature=0.0, logit_bias=pairs)


def test_a_greedy_answer_is_the_same_each_time(rig: Rig) -> None:
    """Alone in the batch."""
    first, again = rig.run("hello world"), rig.run("hello world")
    assert first.text == again.text
    assert first.tokens == first.end.completion_tokens == 8
    assert first.end.prompt_tokens == 2


def test_a_job_ends_with_exactly_one_final_emission(rig: Rig) -> None:
    answer = rig.run("hello", max_tokens=20)
    ends = [e for e in answer.emissions if e.finish_reason or e.error]
    assert ends == [answer.emissions[-1]]
    assert ends[0].finish_reason == "length"


def test_an_end_token_ends_the_answer_and_is_no_text(rig: Rig) -> None:
    """It counts, as it does in vLLM and in llama.cpp's server: the model has generated it."""
    answer = rig.run("hello", sampling=bias((END, 1000.0)))
    assert (answer.text, answer.end.finish_reason, answer.end.completion_tokens) == ("", "stop", 1)
    assert answer.tokens == 1


def test_the_end_token_counts_behind_text_and_within_the_limit(rig: Rig) -> None:
    """A grammar that allows only the end token needs no step for it; an answer that is cut has none."""
    free = rig.run("hello", max_tokens=40, grammar=exactly("turn on"))
    tokens = free.end.completion_tokens
    assert (free.text, free.end.finish_reason, free.tokens) == ("turn on", "stop", tokens)
    assert tokens == len(rig.engine.core.vocabulary.encode("turn on", special=False)) + 1
    fits = rig.run("hello", max_tokens=tokens, grammar=exactly("turn on"))
    assert (fits.text, fits.end.finish_reason, fits.end.completion_tokens) == ("turn on", "stop", tokens)
    cut = rig.run("hello", max_tokens=tokens - 1, grammar=exactly("turn on"))
    assert (cut.text, cut.end.finish_reason, cut.end.completion_tokens) == ("turn on", "length", tokens - 1)


def test_a_stop_string_ends_the_answer_without_an_end_token(rig: Rig) -> None:
    whole = rig.run("hello", max_tokens=40, grammar=exactly("turn on the light"))
    stopped = rig.run("hello", max_tokens=40, grammar=exactly("turn on the light"), stop=("light",))
    assert (stopped.text, stopped.end.finish_reason) == ("turn on the ", "stop")
    assert stopped.end.completion_tokens == stopped.tokens == whole.end.completion_tokens - 1


def test_end_tokens_can_be_ignored(rig: Rig) -> None:
    answer = rig.run("hello", sampling=bias((END, 1000.0)), ignore_eos=True)
    assert (answer.text, answer.end.finish_reason, answer.end.completion_tokens) == ("", "length", 8)


def test_control_tokens_are_never_text(rig: Rig) -> None:
    answer = rig.run("hello", sampling=bias((CONTROL.index("<|user|>"), 1000.0)))
    assert (answer.text, answer.tokens) == ("", 8)


def test_max_tokens_is_cut_to_what_the_context_has_left(rig: Rig) -> None:
    prompt = " ".join(["turn"] * 500)
    answer = rig.run(prompt, max_tokens=1000)
    assert answer.end.prompt_tokens + answer.end.completion_tokens == 512
    assert answer.end.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "code", "words"),
    [
        (Prompt(text=""), "invalid_value", "The prompt is empty."),
        (Prompt(tokens=(1, 99999)), "invalid_value", "Token id 99999 at 1 is unknown. Known ids: 0 to 546"),
        (Prompt(tokens=(-1,)), "invalid_value", "Token id -1 at 0"),
        (Prompt(text="turn " * 600), "context_length_exceeded", "has 601 tokens, this model's context is 512. Shorten"),
        (Prompt(tokens=(7,) * 512), "context_length_exceeded", "this model's context is 512: no tokens are"),
    ],
)
def test_an_invalid_prompt_is_refused(rig: Rig, prompt: Prompt, code: str, words: str) -> None:
    """The error has both numbers where the prompt is too long; nothing is decoded."""
    steps = rig.engine.stats().steps
    answer = rig.run(prompt)
    assert answer.end.error == code
    assert words in answer.end.detail
    assert rig.engine.stats().steps == steps


def test_a_far_too_long_text_is_refused_without_tokenising(rig: Rig) -> None:
    """The count is then a lower bound."""
    prompt = Prompt(text="turn " * 400_000)
    end = rig.run(prompt).end
    assert end.error == "context_length_exceeded"
    assert "at least" in end.detail
    assert 512 < rig.engine.count(prompt) <= 400_001


def test_characters_split_over_tokens_are_emitted_whole(rig: Rig) -> None:
    """Each byte is a token of its own."""
    answer = rig.run("hello", grammar=exactly("é€😀!"), max_tokens=40)
    assert answer.text == "é€😀!"
    assert answer.end.completion_tokens == answer.tokens == 11  # with the end token
    assert all("\ufffd" not in e.text for e in answer.emissions)


def test_a_stop_string_across_tokens_is_never_shown(rig: Rig) -> None:
    """Not even its beginning, in any emission."""
    answer = rig.run("hello", grammar=exactly("say STILL, then STOP and more"), stop=("STOP",), max_tokens=60)
    assert answer.text == "say STILL, then "
    assert answer.end.finish_reason == "stop"
    shown = ""
    for emission in answer.emissions:
        shown += emission.text
        assert "say STILL, then ".startswith(shown)


def test_half_a_stop_string_is_shown_at_the_end(rig: Rig) -> None:
    answer = rig.run("hello", grammar=exactly("one STO"), stop=("STOP",), max_tokens=60)
    assert (answer.text, answer.end.finish_reason) == ("one STO", "stop")


def test_a_seed_makes_sampling_repeatable(rig: Rig) -> None:
    texts = [rig.run("hello", sampling=Sampling(seed=seed), max_tokens=12).text for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


def test_every_sampler_setting_has_an_effect(rig: Rig) -> None:
    """top_k 1 is greedy; top_p near 0 and min_p 1 leave the best token only."""
    greedy = rig.run("hello").text
    for sampling in (Sampling(top_k=1), Sampling(top_p=1e-6, seed=1), Sampling(min_p=1.0, top_k=0, seed=1)):
        assert rig.run("hello", sampling=sampling).text == greedy
    assert rig.run("hello", sampling=Sampling(temperature=0.01, seed=5)).text == greedy


def test_penalties_keep_a_model_from_repeating_itself(rig: Rig) -> None:
    prompt = Prompt(tokens=(300,) * 3)
    for sampling in (
        Sampling(temperature=0.0, presence_penalty=1000.0),
        Sampling(temperature=0.0, frequency_penalty=1000.0),
        Sampling(temperature=0.0, repeat_penalty=1000.0),
    ):
        answer = rig.run(prompt, sampling=sampling, max_tokens=30, logprobs=0, ignore_eos=True)
        tokens = [(entry.token, entry.bytes) for entry in answer.logprobs if entry.bytes]
        assert len(tokens) == len(set(tokens))


def test_a_bias_on_a_token_that_does_not_exist_is_refused(rig: Rig) -> None:
    end = rig.run("hello", sampling=bias((99999, 1.0))).end
    assert (end.error, end.param) == ("invalid_value", "logit_bias.99999")


def test_logprobs_are_the_model_s_own(rig: Rig) -> None:
    """Before temperature, bias and penalties; alternatives in falling order."""
    plain = rig.run("hello", logprobs=3, max_tokens=4)
    assert len(plain.logprobs) == 4
    for entry in plain.logprobs:
        values = [other.logprob for other in entry.top]
        assert values == sorted(values, reverse=True)
        assert entry.logprob == pytest.approx(values[0])
        assert bytes(entry.bytes or ()).decode(errors="replace") == entry.token
    token = rig.engine.core.vocabulary.encode(" world", special=False)[0]
    biased = rig.run("hello", logprobs=3, max_tokens=1, sampling=bias((int(token), 1000.0)))
    assert biased.logprobs[0].token == " world"
    assert biased.logprobs[0].top == plain.logprobs[0].top
    assert biased.logprobs[0].logprob < 0


def test_logprobs_belong_to_the_text_that_is_shown(rig: Rig) -> None:
    """Tokens of a stop string have none."""
    answer = rig.run("hello", grammar=exactly("abc STOP"), stop=("STOP",), logprobs=0, max_tokens=60)
    assert b"".join(bytes(entry.bytes or ()) for entry in answer.logprobs).decode() == answer.text == "abc "


def test_confidence_is_reported_on_the_first_tokens_only(rig: Rig) -> None:
    """score = (1 - refusal) · exp(mean logprob), running means, natural logarithms."""
    answer = rig.run("hello", confidence_tokens=3, logprobs=547, max_tokens=6)
    assert [c.tokens for c in answer.confidences] == [1, 2, 3]
    logs = [entry.logprob for entry in answer.logprobs[:3]]
    last = answer.confidences[-1]
    assert last.logprob == pytest.approx(sum(logs) / 3, abs=1e-4)
    assert last.score == pytest.approx((1 - last.refusal) * math.exp(last.logprob))
    odds = [[math.exp(other.logprob) for other in entry.top] for entry in answer.logprobs[:3]]
    assert last.margin == pytest.approx(sum(p[0] - p[1] for p in odds) / 3, abs=1e-4)
    assert last.entropy == pytest.approx(-sum(q * math.log(q) for p in odds for q in p if q > 0) / 3, abs=1e-3)
    refusal = next(math.exp(t.logprob) for t in answer.logprobs[0].top if t.bytes == () and t.logprob < 0)
    assert 0 < last.refusal < 1
    assert refusal > 0


def test_a_short_answer_has_confidence_too(rig: Rig) -> None:
    answer = rig.run("hello", confidence_tokens=8, sampling=bias((END, 1000.0)))
    assert answer.end.confidence is not None
    assert answer.end.confidence.tokens == 1


def test_a_refusal_ends_the_answer_without_text(rig: Rig) -> None:
    answer = rig.run("hello", sampling=bias((REFUSE, 1000.0)), refusal="end")
    assert (answer.text, answer.end.finish_reason, answer.end.refused) == ("", "stop", True)
    assert answer.end.completion_tokens == 1


def test_a_refusal_can_be_skipped(rig: Rig) -> None:
    """The model continues behind its refusal, which is not text."""
    answer = rig.run("hello", sampling=bias((REFUSE, 1000.0)), refusal="skip")
    assert (answer.text, answer.end.finish_reason, answer.end.refused) == ("", "length", True)
    assert answer.end.completion_tokens == 8


def test_echo_gives_the_prompt_back_first(rig: Rig) -> None:
    assert rig.run("hello world", echo=True).text.startswith("hello world")


def test_a_prompt_can_be_tokens(rig: Rig) -> None:
    tokens = rig.engine.core.prompts.tokens(Prompt(text="turn on the light"))
    by_tokens, by_text = rig.run(Prompt(tokens=tuple(tokens.tolist()))), rig.run("turn on the light")
    assert by_tokens.text == by_text.text


def test_embeddings_have_length_one_and_differ_by_text(rig: Rig) -> None:
    """Also for a text longer than a chunk."""
    first, same, other = (rig.run(text, embed=True).end for text in ("hello world", "hello world", "turn " * 100))
    assert first.embedding == same.embedding != other.embedding
    assert len(first.embedding) == rig.engine.info.embedding_dimensions == 64
    assert math.fsum(x * x for x in other.embedding) == pytest.approx(1.0)
    assert (other.prompt_tokens, other.finish_reason) == (101, "stop")


def test_embeddings_and_answers_share_the_engine(rig: Rig) -> None:
    answer = rig.start("hello", max_tokens=60, ignore_eos=True)
    embedding = rig.start("turn " * 100, embed=True)
    assert rig.answer(embedding).end.embedding
    assert rig.answer(answer).end.completion_tokens == 60


def test_the_count_is_the_answer_s_prompt_tokens(rig: Rig) -> None:
    prompt = chat("turn on the light", "ok", "and the music")
    assert rig.engine.count(prompt) == rig.run(prompt, sampling=GREEDY).end.prompt_tokens


def test_the_model_s_defaults_apply_where_a_job_has_none(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(temperature=0.0, answer_tokens=5)
    greedy = rig.run("hello", ignore_eos=True, sampling=GREEDY, max_tokens=5)
    defaults = rig.run("hello", ignore_eos=True, sampling=Sampling(), max_tokens=None)
    assert (defaults.text, defaults.end.finish_reason, defaults.end.completion_tokens) == (greedy.text, "length", 5)
    assert rig.run("hello", ignore_eos=True, sampling=Sampling(), max_tokens=7).end.completion_tokens == 7
    hot = {rig.run("hello", ignore_eos=True, sampling=Sampling(temperature=2.0, seed=n)).text for n in range(5)}
    assert len(hot) > 1
