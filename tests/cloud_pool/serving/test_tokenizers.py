"""The tokens of a tier's prompts: from the artifact's file, from a `tokenizer.json`, or from its server."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from causeway_server.cloud_pool.serving.tokenizers import TierTokenizers
from causeway_server.cloud_pool.tiers.config import TierConfig
from causeway_server.cloud_pool.tiers.tier import Tier, load_tiers
from causeway_server.models.llama_cpp.protocol import Prompt
from causeway_server.router.anthropic.request import parse_count
from causeway_server.router.errors import ConfigError, InvalidRequest, UnsupportedFeature
from causeway_server.router.openai.tokens import TokenizeRequest, parse_tokenize
from causeway_server.router.types import Message, Request, RoutingHints
from tests.bed.conversations import conversation
from tests.bed.count_tokens import FAMILIES, model_of, tier_of
from tests.models.llama_cpp.conftest import Rig, make_rig, tiny_model, tiny_options

__all__ = ["make_rig", "tiny_model", "tiny_options"]
TOKENIZERS = TierTokenizers({})


async def tokens(tier: Tier, request: Request, *, adds_special: bool = True) -> tuple[int, ...]:
    asked = TokenizeRequest(request, adds_special)
    return (await TOKENIZERS.tokenize(tier, asked, asyncio.get_running_loop().time() + 60.0)).tokens


@pytest.mark.engine
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_chat_has_the_tokens_that_the_engine_reads(
    family: str, tmp_path: Path, make_rig: Callable[..., Rig]
) -> None:
    """The gateway counts from the GGUF file alone, the engine from its prompt, and reads as many."""
    path = model_of(tmp_path, family)
    rig, tier, rng = make_rig(model_path=str(path), context_tokens=8192), tier_of(path), random.Random(5)
    counted = 0
    for _ in range(6):
        body = {name: value for name, value in conversation(rng, "m").items() if name != "max_tokens"}
        request = parse_count(msgspec.json.encode(body), RoutingHints())
        prompt = prompt_of(request)
        end = rig.run(prompt, max_tokens=1).end
        if end.error:
            with pytest.raises(InvalidRequest):
                await tokens(tier, request)
            continue
        found = await tokens(tier, request)
        assert (len(found), rig.engine.count(prompt)) == (end.prompt_tokens, end.prompt_tokens)
        assert found == rig.engine.tokenize(prompt)
        counted += 1
    assert counted >= 4


def prompt_of(request: Request) -> Prompt:
    return Prompt(messages=request.messages, tools=request.tools)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `tokenizer.json` of bytes, which begins each text with <s>."""
    letters = {letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    model = Tokenizer(models.BPE(vocab=letters, merges=[]))
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    model.add_special_tokens(["<s>", "<|u|>"])
    model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    model.save(str(path))
    return path


def with_template(folder: Path, vocabulary: str, **fields: object) -> TierConfig:
    template = folder / "t.jinja"
    template.write_text("{% for m in messages %}<|u|>{{ m.content }}{% endfor %}")
    return TierConfig(
        name="big",
        template_file=str(template),
        tokenizer_file=vocabulary,
        special_tokens=("<|u|>",),
        context_tokens=99,
        **fields,  # type: ignore[arg-type]
    )


async def test_a_tokenizer_file_counts_for_a_model_of_another_backend(tmp_path: Path, vocabulary: Path) -> None:
    """A caller's `<|u|>` is plain text, as in the prompt that Triton gets; the template's is a token."""
    (tier,) = load_tiers([with_template(tmp_path, str(vocabulary))])
    found = await tokens(tier, Request(kind="chat", model="big", messages=(Message("user", "a<|u|>"),)))
    assert found[:2] == (256, 257)
    assert 257 not in found[2:]
    bare = Request(kind="completion", model="big", prompts=("hé",))
    assert len(await tokens(tier, bare)) == 4
    assert len(await tokens(tier, bare, adds_special=False)) == 3
    deadline = asyncio.get_running_loop().time() + 60.0
    assert await TOKENIZERS.detokenize(tier, await tokens(tier, bare), deadline) == "<s>hé"
    with pytest.raises(InvalidRequest, match="258 is unknown"):
        await TOKENIZERS.detokenize(tier, (258,), deadline)


async def test_a_tier_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    (tier,) = load_tiers([with_template(tmp_path, "")])
    with pytest.raises(UnsupportedFeature, match="'big' has no tokenizer here"):
        await tokens(tier, Request(kind="completion", model="big", prompts=("a",)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"template_file": "", "name": "assistant-large"}, "an artifact has its own tokenizer"),
        ({"tokenizer_file": "/none/tokenizer.json"}, "does not exist"),
    ],
)
def test_a_wrong_tokenizer_file_is_refused_at_start(
    tmp_path: Path, vocabulary: Path, fields: dict[str, str], message: str
) -> None:
    config = msgspec.structs.replace(with_template(tmp_path, str(vocabulary)), **fields)
    with pytest.raises(ConfigError, match=message) as refused:
        load_tiers([config])
    assert refused.value.where == "tiers[0].tokenizer_file"


@pytest.mark.engine
async def test_tokens_of_the_shipped_model_become_its_text_again() -> None:
    (tier,) = load_tiers([TierConfig(name="assistant-large")])
    text = "turn on the light 42 naïve"
    found = await tokens(
        tier, parse_tokenize(json.dumps({"model": "m", "prompt": text}).encode(), RoutingHints()).request
    )
    deadline = asyncio.get_running_loop().time() + 60.0
    assert (await TOKENIZERS.detokenize(tier, found, deadline)).endswith(text)
    with pytest.raises(InvalidRequest, match="ids: 0 to"):
        await TOKENIZERS.detokenize(tier, (10**6,), deadline)
