"""The shipped models: their hashes match, llama.cpp loads them, and they answer device commands sensibly."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from causeway_server.models.catalog.artifact import SHIPPED, Artifact, find_artifact, list_artifacts, verify_artifact
from causeway_server.models.catalog.gguf import read_gguf
from causeway_server.models.signals.quality import QualityEstimator
from causeway_train.cli.signals import ROUTING_LINK
from causeway_train.data.prompt_renderer import PromptRenderer
from causeway_train.function_calls.call import parse_call
from causeway_train.publish import assistant_card
from causeway_train.publish_signal import signal_card

llama_cpp = pytest.importorskip("llama_cpp")

from causeway_server.models.constraints.grammars import ANY_CALL  # noqa: E402
from causeway_train.evaluate.greedy import GreedyModel  # noqa: E402

ARTIFACTS = [artifact for artifact in list_artifacts() if artifact.manifest.format == "gguf"]
NAMES = [artifact.name for artifact in ARTIFACTS]
LIMIT_BYTES = 40 * 2**20


def test_both_assistants_ship_and_are_small() -> None:
    assert {"assistant", "assistant-large"} <= set(NAMES)
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) < LIMIT_BYTES


@pytest.mark.parametrize("artifact", ARTIFACTS, ids=NAMES)
def test_manifest_and_card_agree_with_the_weights(artifact: Artifact) -> None:
    verify_artifact(artifact)
    gguf, manifest = read_gguf(artifact.path), artifact.manifest
    assert (gguf.quantisation, gguf.context_length) == (manifest.quantisation, manifest.context_length)
    assert gguf.refuse_token == manifest.refuse_token
    assert gguf.tokenizer_sha256 == manifest.tokenizer_sha256
    assert gguf.chat_template is not None
    assert hashlib.sha256(gguf.chat_template.encode()).hexdigest() == manifest.chat_template_sha256
    assert manifest.data
    assert manifest.name in (artifact.folder / "README.md").read_text()


@pytest.mark.parametrize("artifact", list_artifacts(), ids=lambda artifact: artifact.name)
def test_cards_are_generated_from_the_manifests(artifact: Artifact) -> None:
    """The calibrator's card ends with a link to the routing figures, a calibrated pair's with its report."""
    written, manifest = (artifact.folder / "README.md").read_text(encoding="utf-8"), artifact.manifest
    report = artifact.folder / "report.md"
    appendix = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    cards = [assistant_card(manifest)] if manifest.format == "gguf" else []
    assert written in (*cards, signal_card(manifest, appendix), signal_card(manifest, ROUTING_LINK))


def test_only_the_device_model_refuses() -> None:
    """The large model answers `out_of_scope` instead and has no refusal token."""
    by_name = {artifact.name: artifact for artifact in ARTIFACTS}
    assert by_name["assistant"].manifest.refuse_token == "<|refuse|>"
    assert by_name["assistant-large"].manifest.refuse_token is None
    with GreedyModel(by_name["assistant"].path, slots=1, context=256, threads=1) as model:
        assert [int(model.metadata("causeway.refuse_token_id") or -1)] == model.tokenize("<|refuse|>")


def test_the_quality_signal_belongs_to_the_shipped_device_model() -> None:
    """It estimates a plain command above a factual question."""
    pytest.importorskip("onnxruntime")
    signal = find_artifact("edge-quality")
    verify_artifact(signal)
    quality = QualityEstimator(signal.path_for(find_artifact("assistant")))
    assert quality("turn off the lights in the kitchen") > 0.5
    assert quality("what is the capital of france") < 0.2
    assert quality("Explain quantum computing in three sentences.") < 0.2


def test_the_device_model_is_4_bit_throughout() -> None:
    """Every matrix is Q4_K, except the tied embedding and those that Q4_K_M leaves at Q6_K; only the norms are F32."""
    kinds = read_gguf(next(a for a in ARTIFACTS if a.name == "assistant").path).tensor_types
    assert set(kinds) <= {"Q4_K", "Q6_K", "F32"}
    assert kinds["Q4_K"] > 0.7 * sum(kinds.values())
    assert kinds["F32"] < 0.01 * sum(kinds.values())


@pytest.mark.parametrize("artifact", ARTIFACTS, ids=NAMES)
def test_special_tokens_are_single_tokens(artifact: Artifact) -> None:
    """The chat template adds two tokens to a message, or repeats it after one more."""
    with GreedyModel(artifact.path, slots=2, context=512, threads=1) as model:
        prompter = PromptRenderer(model.chat_template)
        text = "turn on the light"
        ids = model.tokenize(prompter.user(text))
        repeats = "<|again|>" in model.chat_template
        assert len(ids) == (1 + repeats) * (len(model.tokenize(text)) + 1) + 1
        for marker in ("<|user|>", "<|assistant|>", "<|end|>", "<|refuse|>", *["<|again|>"] * repeats):
            assert len(model.tokenize(marker)) == 1
        assert model.ends(model.tokenize("<|end|>")[0])
        assert model.piece(model.tokenize("<|refuse|>")[0]) == b""


@pytest.mark.parametrize("artifact", ARTIFACTS, ids=NAMES)
def test_the_template_renders_openai_messages(artifact: Artifact) -> None:
    """System messages are skipped, content parts are joined, and only the last exchange is rendered. The last message
    is repeated unless it is long.
    """
    template = read_gguf(artifact.path).chat_template
    assert template is not None
    prompter = PromptRenderer(template)
    repetition = "<|again|>{}" if "<|again|>" in template else ""
    turns: list[dict[str, object]] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}]
    assert prompter.render(turns) == f"<|user|>one{repetition.format('one')}<|assistant|>"
    assert prompter.user("long " * 100) == f"<|user|>{('long ' * 100).strip()}<|assistant|>"
    turns += [{"role": "assistant", "content": "two"}, {"role": "user", "content": [{"type": "text", "text": "three"}]}]
    last = f"<|user|>one<|assistant|>two<|end|><|user|>three{repetition.format('three')}<|assistant|>"
    assert prompter.render(turns) == last
    earlier: list[dict[str, object]] = [{"role": "user", "content": "zero"}, {"role": "assistant", "content": None}]
    assert prompter.render(earlier + turns) == last


def test_the_device_model_answers_commands_and_refuses_the_rest() -> None:
    commands = {
        "wake me up at six am": "alarm_set",
        "turn off the lights": "iot_hue_lightoff",
        "Add this song to my workout playlist": "playlist_add",
        "please vacuum the floor": "iot_cleaning",
    }
    others = ["what is the capital of france", "write me a poem about dogs", "Explain quantum computing."]
    path = next(a for a in ARTIFACTS if a.name == "assistant").path
    with GreedyModel(path, threads=1, context=2048) as model:
        prompter = PromptRenderer(model.chat_template)
        answers = model.answers([model.tokenize(prompter.user(text)) for text in [*commands, *others]])
        calls = [parse_call(answer.text) for answer in answers]
        assert [call.name if call else None for call in calls[: len(commands)]] == list(commands.values())
        assert all(answer.refuse < 0.5 for answer in answers[: len(commands)])
        assert all(answer.refuse > 0.5 for answer in answers[len(commands) :])
        assert {call.name if call else None for call in calls[len(commands) :]} == {"out_of_scope"}


@pytest.mark.parametrize("artifact", ARTIFACTS, ids=NAMES)
def test_with_the_grammar_every_answer_is_a_call(artifact: Artifact) -> None:
    """Also on noise, quotes and other languages."""
    odd = ["", "%%%", 'say "hello" \\ to them', "Wie spät ist es?", "{}", "play " * 30]
    with GreedyModel(artifact.path, threads=1, context=2048) as model:
        prompter = PromptRenderer(model.chat_template)
        prompts = [model.tokenize(prompter.user(text)) for text in odd]
        answers = model.answers(prompts, 200, [ANY_CALL] * len(odd))
    ended = [answer for answer in answers if len(answer.tokens) < 200]
    assert len(ended) >= len(odd) - 1
    assert all(parse_call(answer.text) for answer in ended), [msgspec.to_builtins(answer) for answer in ended]
