"""The token of a truncated answer: for one tenant, one question, and a limited time."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from cryptography.fernet import Fernet, MultiFernet
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.cloud_pool.degradation.continue_token import (
    ContinueTokens,
    PartialAnswer,
    continued,
    is_resumable,
    load_continue_tokens,
)
from causeway_server.cloud_pool.tiers.config import TierConfig
from causeway_server.cloud_pool.tiers.tier import ChatFormat, Tier
from causeway_server.models.chat.sandbox import MARK
from causeway_server.router.errors import ConfigError, InvalidRequest, PermissionDenied
from causeway_server.router.types import Message, Request, ResponseFormat, Sampling, Tool

KEY = Fernet.generate_key()
REQUEST = Request(kind="chat", model="large", messages=(Message("user", "tell me"),), max_tokens=500)
SO_FAR = PartialAnswer("large", "Once upon", 2)


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def gateway(*keys: bytes, clock: Clock | None = None, ttl_s: float = 60.0) -> ContinueTokens:
    return ContinueTokens(MultiFernet([Fernet(key) for key in keys or (KEY,)]), ttl_s, wall_clock=clock or Clock())


def resumed(token: str, request: Request = REQUEST) -> Request:
    return msgspec.structs.replace(request, resume=token)


def test_any_gateway_with_the_key_reads_a_token() -> None:
    """Streamed or not: delivery is no part of the question."""
    token = gateway().issue("acme", REQUEST, SO_FAR)
    assert gateway().read("acme", resumed(token)) == SO_FAR
    assert gateway().read("acme", resumed(token, msgspec.structs.replace(REQUEST, stream=True))) == SO_FAR


@given(st.text(max_size=300), st.integers(0, 10_000))
def test_a_token_keeps_any_text_and_hides_it(text: str, tokens: int) -> None:
    token = gateway().issue("acme", REQUEST, PartialAnswer("large", text, tokens))
    assert gateway().read("acme", resumed(token)) == PartialAnswer("large", text, tokens)


def test_another_tenants_token_is_rejected() -> None:
    token = gateway().issue("acme", REQUEST, SO_FAR)
    with pytest.raises(PermissionDenied):
        gateway().read("other", resumed(token))


def test_a_token_of_another_question_is_rejected() -> None:
    token = gateway().issue("acme", REQUEST, SO_FAR)
    for change in ({"messages": (Message("user", "no"),)}, {"max_tokens": 501}, {"model": "small"}):
        with pytest.raises(InvalidRequest, match="another request"):
            gateway().read("acme", resumed(token, msgspec.structs.replace(REQUEST, **change)))


def test_an_expired_token_is_rejected() -> None:
    clock = Clock()
    token = gateway(clock=clock).issue("acme", REQUEST, SO_FAR)
    clock.now += 60.0
    assert gateway(clock=clock).read("acme", resumed(token)) == SO_FAR
    clock.now += 1.0
    with pytest.raises(InvalidRequest, match="expired"):
        gateway(clock=clock).read("acme", resumed(token))


@given(st.integers(0, 200), st.text(min_size=1))
def test_a_forged_token_is_rejected(at: int, garbage: str) -> None:
    token = gateway().issue("acme", REQUEST, SO_FAR)
    at %= len(token) - 4  # the last characters may hold bits that mean nothing
    changed = token[:at] + ("A" if token[at] != "A" else "B") + token[at + 1 :]
    foreign = gateway(Fernet.generate_key()).issue("acme", REQUEST, SO_FAR)
    for forged in (changed, foreign, garbage, token[:-4], "é" * 40, "\ud800"):
        with pytest.raises(InvalidRequest):
            gateway().read("acme", resumed(forged))


def test_the_first_key_signs_and_all_verify() -> None:
    new = Fernet.generate_key()
    old_token = gateway(KEY).issue("acme", REQUEST, SO_FAR)
    assert gateway(new, KEY).read("acme", resumed(old_token)) == SO_FAR
    with pytest.raises(InvalidRequest):
        gateway(new).read("acme", resumed(old_token))
    assert gateway(new).read("acme", resumed(gateway(new, KEY).issue("acme", REQUEST, SO_FAR))) == SO_FAR


def test_the_key_file_is_optional_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    assert load_continue_tokens("", 60.0) is None
    for bad in ("", "secret\n", "é"):
        path.write_text(bad)
        with pytest.raises(ConfigError, match=r"degradation\.continue_key_file"):
            load_continue_tokens(str(path), 60.0)
    path.write_bytes(KEY + b"\n" + Fernet.generate_key() + b"\n")
    made = load_continue_tokens(str(path), 60.0)
    assert made is not None
    assert made.read("a", resumed(made.issue("a", REQUEST, SO_FAR))) == SO_FAR
    with pytest.raises(ConfigError):
        load_continue_tokens(str(tmp_path / "none"), 60.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"tools": (Tool("lamp"),)},
        {"response_format": ResponseFormat("json_object")},
        {"stop": ("\n",)},
        {"sampling": Sampling(presence_penalty=0.5)},
        {"sampling": Sampling(frequency_penalty=-0.5)},
        {"sampling": Sampling(repeat_penalty=1.1)},
    ],
)
def test_requests_with_hidden_state_are_not_resumable(fields: dict[str, object]) -> None:
    assert is_resumable(REQUEST)
    assert is_resumable(msgspec.structs.replace(REQUEST, response_format=ResponseFormat(), sampling=Sampling(seed=3)))
    assert not is_resumable(msgspec.structs.replace(REQUEST, **fields))


def test_several_prompts_are_not_resumable() -> None:
    assert is_resumable(Request(kind="completion", model="large", prompts=("a",)))
    assert not is_resumable(Request(kind="completion", model="large", prompts=("a", "b")))


def test_a_control_token_in_the_text_stays_text() -> None:
    config = TierConfig(name="t", template_file="x")
    ours = Tier(config, ChatFormat("", special=("<|end|>",), is_ours=True))
    stock = Tier(config, ChatFormat("", special=("<|end|>",)))
    assert continued(ours, "P:", "a < b") == continued(stock, "P:", "a < b") == "P:a < b"
    assert continued(ours, "P:", "say <|end|>") == f"P:say <{MARK}|end|>"
    assert continued(stock, "P:", "say <|end|>") == "P:say < |end|>"
