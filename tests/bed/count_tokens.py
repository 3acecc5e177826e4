"""Is `count_tokens` the length of the prompt that the engine reads, to the token?

    python -m tests.bed.count_tokens --conversations 1000 --seed 2

For the template of each model family a daemon runs a tiny model with it. Each conversation is counted by
`/v1/messages/count_tokens` and, as a chat, by `/v1/tokenize`, is then answered with one token, and is counted once
more as a gateway before Triton counts it, from the GGUF file alone. The `usage` of the answer is the truth.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from causeway_server.cloud_pool.serving.tokenizers import TierTokenizers
from causeway_server.cloud_pool.tiers.config import TierConfig
from causeway_server.cloud_pool.tiers.tier import Tier, read_chat_format
from causeway_server.edge_node.backends.engine.backend import EngineBackend
from causeway_server.edge_node.config.schema import EngineConfig
from causeway_server.router.anthropic.request import parse_count
from causeway_server.router.openai.tokens import TokenizeRequest
from causeway_server.router.openai.upstream.wire import encode_request
from causeway_server.router.types import Request, RoutingHints
from tests.edge_node.device import Device, running
from tests.models.chat import family_templates
from tests.models.llama_cpp.tiny_gguf import write_tiny_gguf
from tests.tool import run_tool

from .conversations import MARKS, conversation

POLICY = """
version: 1
name: bed
targets: {small: {at: edge, model: m-small}}
routes: [{name: all, use: [small]}]
"""
FAMILIES = {name: template for name, template in vars(family_templates).items() if name.isupper() and name[0] != "_"}


def tier_of(path: Path) -> Tier:
    """Return the tier of a gateway before Triton that runs this model."""
    return Tier(TierConfig(name="m"), msgspec.structs.replace(read_chat_format(path), tokenizer=str(path)))


def model_of(folder: Path, family: str) -> Path:
    """Write a tiny model with the family's template and control tokens."""
    return write_tiny_gguf(
        folder / f"{family}.gguf", template=FAMILIES[family], marks=MARKS[:6] + MARKS[7:14], context=32768
    )


async def compare(device: Device, tier: Tier, body: dict[str, Any]) -> str:
    """Return "" if all counts are the same, and else what differs. A refusal must be one everywhere."""
    request = parse_count(msgspec.json.encode({k: v for k, v in body.items() if k != "max_tokens"}), RoutingHints())
    counted = await _post(device, "/v1/messages/count_tokens", {k: v for k, v in body.items() if k != "max_tokens"})
    chat = msgspec.json.decode(encode_request(request, "small", stream=False))
    listed = await _post(device, "/v1/tokenize", {k: chat[k] for k in ("model", "messages", "tools") if k in chat})
    answered = await _post(device, "/v1/messages", body)
    truth: Any = answered.get("usage")
    if truth is None:
        return "" if "error" in counted and "error" in listed else f"only the answer is refused: {answered}"
    length = truth["input_tokens"] + truth["cache_read_input_tokens"]
    counts = {
        "count_tokens": counted.get("input_tokens"),
        "tokenize": listed.get("count"),
        "gateway": await _at_gateway(tier, request),
    }
    wrong = {name: count for name, count in counts.items() if count != length}
    return f"the engine's prompt has {length} tokens: {wrong} {counted.get('error', '')}" if wrong else ""


async def _at_gateway(tier: Tier, request: Request) -> int:
    deadline = asyncio.get_running_loop().time() + 60.0
    return (await _TOKENIZERS.tokenize(tier, TokenizeRequest(request), deadline)).count


_TOKENIZERS = TierTokenizers({})


async def _post(device: Device, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with device.session.post(path, json={**body, "model": "small"}) as reply:
        found: dict[str, Any] = msgspec.json.decode(await reply.read())
        return found


async def measure(families: list[str], conversations: int, seed: int) -> bool:
    passed = True
    for family in families:
        with tempfile.TemporaryDirectory() as name:
            path = model_of(Path(name), family)
            tier = tier_of(path)
            engine: Any = EngineBackend(path, EngineConfig(threads=1, sequences=2))
            async with running(Path(name), engine=engine, policy=POLICY) as device:
                await engine.ready(asyncio.get_running_loop().time() + 600.0)
                rng, wrong = random.Random(seed), Counter[str]()
                for at in range(conversations):
                    if found := await compare(device, tier, conversation(rng, "small")):
                        wrong["different"] += 1
                        if wrong["different"] <= 3:
                            print(f"{family}, conversation {at}: {found}", flush=True)
                print(f"{family}: {conversations} conversations, {wrong['different']} counts differ", flush=True)
                passed = passed and not wrong
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=1000, help="of each family")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--family", action="append", choices=FAMILIES, help="only these")
    args = parser.parse_args()
    passed = asyncio.run(measure(args.family or list(FAMILIES), args.conversations, args.seed))
    print("PASS" if passed else "FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(run_tool(main))
