"""What a second model changes, on tiny models with real weights, and the gate before a model is added."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result

pytest.importorskip("llama_cpp")

from causeway_server.models.catalog.artifact import ArtifactError, find_artifact
from causeway_server.models.cli.commands import main
from causeway_server.models.comparison.compare import Comparison, Run, compare, parse_limits, rouge_l, wilson
from causeway_server.models.comparison.model import ComparedModel
from causeway_server.models.comparison.prompts import EvaluationPrompt
from tests.models.llama_cpp.tiny_gguf import WORDS, write_tiny_gguf

LONG = " ".join(WORDS * 8)  # more tokens than one chunk
PROMPTS = (
    EvaluationPrompt(prompt="the light", answer="kitchen", metric="text", task="home"),
    EvaluationPrompt(prompt=LONG, answer="turn off", metric="text", task="home"),
    EvaluationPrompt(prompt="what is hello world", answer="B", metric="choice", choices={"A": "it", "B": "is"}),
)
RUN = Run(context=1024, threads=1)
Write = Callable[..., Path]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    folder = tmp_path_factory.mktemp("models")

    def written(name: str, noise: float = 0.0, **options: object) -> Path:
        """`noise` is added to a matrix of 64 × 64 weights, whose own deviation is 0.125."""
        drawn = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
        return write_tiny_gguf(folder / name, deltas={"blk.1.attn_output.weight": noise * drawn}, **options)  # type: ignore[arg-type]

    return written


@pytest.fixture(scope="module")
def original(write: Write) -> Path:
    return write("original.gguf")


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    short = (PROMPTS[0], PROMPTS[2])
    path.write_bytes(b"\n".join(msgspec.json.encode(one) for one in short))
    return path


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


def test_a_model_beside_itself_changes_nothing(original: Path) -> None:
    found = compare(original, original, PROMPTS, RUN)
    assert (found.kl_mean, found.kl_p99, found.top1, found.perplexity_ratio) == (0, 0, 1, 1)
    assert (found.exact_match, found.rouge_l) == (1, 1)
    assert found.first.accuracy == found.second.accuracy
    assert found.first.accuracy.keys() == {"all", "home", "prompts"}
    assert found.accuracy_change is not None
    assert found.accuracy_change.value == 0
    assert found.first.memory_bytes > 0
    assert found.first.tokens_per_s is not None


def test_the_figures_per_token_are_those_of_the_whole_text_at_once(original: Path, write: Write) -> None:
    """Chunks, and the tokens that all prompts begin with, are not seen in them."""
    changed = write("changed.gguf", 0.01)
    found = compare(original, changed, PROMPTS[:2], msgspec.structs.replace(RUN, answers=0))
    divergences, losses = [], []
    models = [ComparedModel(path, context=1024, threads=1) for path in (original, changed)]
    for prompt in PROMPTS[:2]:
        answer = models[0].vocabulary.encode(prompt.answer or "", special=False)
        tokens = np.concatenate([models[0].encode(prompt), answer]).astype(np.int32)
        one, other = (np.concatenate([rows.copy() for rows in model.logits(tokens)])[:-1] for model in models)
        one, other = (rows - np.log(np.exp(rows.astype(np.float64)).sum(-1, keepdims=True)) for rows in (one, other))
        losses += (-one[np.arange(len(one)), tokens[1:]]).tolist()[1:]
        divergences += (np.exp(one) * (one - other)).sum(-1).tolist()[1:]
    for model in models:
        model.close()
    assert found.tokens == len(divergences) > 256
    assert found.kl_mean == pytest.approx(np.mean(divergences), rel=1e-3)
    assert found.kl_p99 == pytest.approx(np.percentile(divergences, 99), rel=1e-3)
    assert found.first.perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)
    assert found.exact_match is None
    assert 0 < np.mean(divergences) < 1


def test_a_rounded_kv_cache_shows_in_the_figures(original: Path) -> None:
    found = compare(original, original, PROMPTS, msgspec.structs.replace(RUN, kv_types=("f16", "q8_0")))
    assert found.kl_mean is not None
    assert 0 < found.kl_mean < 0.01


def test_other_vocabularies_leave_the_answers_alone_to_compare(original: Path, write: Write) -> None:
    found = compare(original, write("other.gguf", words=("turn", "on")), PROMPTS[:1], RUN)
    assert (found.kl_mean, found.top1, found.first.perplexity, found.tokens) == (None, None, None, 0)
    assert found.rouge_l is not None


def test_a_prompt_that_does_not_fit_is_named(original: Path) -> None:
    with pytest.raises(ArtifactError, match=r"raise --context\. The prompt begins with 'the turn on"):
        compare(original, original, PROMPTS, Run(context=128, threads=1))
    with pytest.raises(ArtifactError, match="not a GGUF file"):
        compare(original, Path(__file__), PROMPTS, RUN)


def test_the_answered_prompts_are_from_the_whole_file(original: Path) -> None:
    prompts = [
        EvaluationPrompt(prompt="the light " * (1 + n % 5), answer="A", metric="choice", choices={"A": "it"}, task=task)
        for n, task in enumerate(["first"] * 20 + ["last"] * 20)
    ]
    found = compare(original, original, prompts, msgspec.structs.replace(RUN, answers=4))
    assert (found.prompts, found.answered) == (40, 4)
    assert found.first.accuracy.keys() == {"all", "first", "last"}


@pytest.mark.slow
def test_the_gate_has_the_context_of_the_model(original: Path, tmp_path: Path) -> None:
    """So that the advice of its refusal helps."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(msgspec.json.encode(PROMPTS[1]))
    gate = ("--against", original, "--prompts", prompts, "--limit", "kl_mean=0.05")
    small, large = (
        call("add", original, "--name", "mine", "--to", tmp_path, "--context", n, *gate) for n in (128, 1024)
    )
    assert (small.exit_code, "exceeds the context of 128 tokens: raise --context." in small.output) == (1, True)
    assert large.exit_code == 0, large.output
    assert "compared by 1 prompts, 1 of them answered" in large.output
    assert find_artifact("mine", (tmp_path,)).manifest.metrics["compared/answered"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("noise", [1.0, float("nan")])
def test_the_gate_refuses_a_damaged_model_with_the_figures(
    original: Path, write: Write, prompts_file: Path, tmp_path: Path, noise: float
) -> None:
    gate = ("--against", original, "--prompts", prompts_file, "--limit", "kl_mean=0.05", "--limit", "top1=0.9")
    damaged = call("add", write("damaged.gguf", noise), "--name", "mine", "--to", tmp_path, "--context", 512, *gate)
    assert damaged.exit_code == 1
    assert f"refused in the comparison with {original}: kl_mean is " in damaged.output
    assert "the limit is 0.05; top1 is " in damaged.output
    assert "(2 of 2 prompts were answered)" in damaged.output
    assert not list(tmp_path.iterdir())
    added = call("add", write("near.gguf", 0.001), "--name", "mine", "--to", tmp_path, "--context", 512, *gate)
    assert added.exit_code == 0, added.output
    metrics = find_artifact("mine", (tmp_path,)).manifest.metrics
    assert metrics["compared/kl_mean"] < 0.05
    assert metrics["compared/top1"] >= 0.9


def test_the_command_prints_json_and_exits_with_1_beyond_a_limit(original: Path, prompts_file: Path) -> None:
    same = call("compare", original, original, "--prompts", prompts_file, "--context", 512, "--format", "json")
    assert same.exit_code == 0, same.output
    assert msgspec.json.decode(same.stdout, type=Comparison).prompts == 2
    arguments = ("compare", original, original, "--prompts", prompts_file, "--context", 512, "--answers", 0)
    broken = call(*arguments, "--limit", "kl_mean=-1", "--limit", "rouge_l=0.5")
    assert broken.exit_code == 1
    assert "KL divergence" in broken.stdout
    assert "refused: kl_mean is 0, the limit is -1" in broken.stderr
    assert "refused: rouge_l could not be measured" in broken.stderr


def test_options_of_the_gate_belong_together(original: Path, prompts_file: Path, tmp_path: Path) -> None:
    alone = call("add", original, "--to", tmp_path, "--prompts", prompts_file)
    assert (alone.exit_code, "--against, --prompts and --limit must be given together" in alone.output) == (2, True)
    for limit in ("speed=1", "kl_mean", "kl_mean=small"):
        with pytest.raises(ArtifactError, match=f"--limit {limit}: write FIGURE=NUMBER; the figures are kl_mean"):
            parse_limits([limit])


@pytest.mark.parametrize(
    ("text", "reference", "score"),
    [
        ("the cat sat", "The cat sat.", 1.0),
        ("police killed the gunman", "police kill the gunman", 0.75),
        ("the gunman kill police", "police kill the gunman", 0.5),
        ("", "", 1.0),
        ("", "word", 0.0),
    ],
)
def test_rouge_l(text: str, reference: str, score: float) -> None:
    """The examples in the middle are Lin's."""
    assert rouge_l(text, reference) == pytest.approx(score)


def test_the_interval_is_wilsons() -> None:
    found = wilson(8, 10)
    assert (found.low, found.high) == pytest.approx((0.4902, 0.9433), abs=1e-3)
    assert wilson(0, 5).low == 0
