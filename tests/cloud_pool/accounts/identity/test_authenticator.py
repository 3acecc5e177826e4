"""`Authorization` header to Principal."""

from __future__ import annotations

import hashlib

import pytest

from causeway_server.cloud_pool.accounts.identity.authenticator import Authenticator, StaticToken, StaticTokens
from causeway_server.cloud_pool.core.principal import ANYONE
from causeway_server.router.errors import AuthenticationFailed, PermissionDenied
from causeway_server.router.serving.responses import error_response

from .token_issuer import NOW, Issuer

STATIC = StaticTokens((StaticToken("kiosk", hashlib.sha256(b"secret").digest()),))


def gate(issuer: Issuer, static: StaticTokens) -> Authenticator:
    return Authenticator(static, issuer.verifier(), clock=lambda: 0.0, wall_clock=lambda: NOW)


def test_without_tokens_every_caller_is_accepted() -> None:
    assert Authenticator(StaticTokens()).principal("") is ANYONE


def test_static_and_signed_tokens_work_side_by_side(issuer: Issuer) -> None:
    both = gate(issuer, STATIC)
    assert both.principal("Bearer secret").owner == "default/kiosk"
    assert both.principal(f"bearer {issuer.sign()}").owner == "acme/kiosk-17"


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic secret", "secret", "Bearer wrong"])
def test_missing_and_unknown_tokens_are_refused(issuer: Issuer, header: str) -> None:
    for static in (STATIC, StaticTokens()):
        with pytest.raises(AuthenticationFailed):
            gate(issuer, static).principal(header)


def test_with_keys_only_static_tokens_are_refused(issuer: Issuer) -> None:
    with pytest.raises(AuthenticationFailed):
        gate(issuer, StaticTokens()).principal("Bearer secret")


def test_a_token_has_its_scopes_only(issuer: Issuer) -> None:
    """A static token never has the scope admin."""
    both = gate(issuer, STATIC)
    chat = both.principal(f"Bearer {issuer.sign({'scope': 'chat'})}")
    chat.require("chat")
    for principal, scope in ((chat, "jobs"), (chat, "admin"), (both.principal("Bearer secret"), "admin")):
        with pytest.raises(PermissionDenied) as caught:
            principal.require(scope)  # type: ignore[arg-type]
        assert error_response(caught.value).status == 403
    both.principal(f"Bearer {issuer.sign({'scope': 'admin'})}").require("admin")
    with pytest.raises(PermissionDenied):
        both.principal(f"Bearer {issuer.sign({'scope': ''})}").require("chat")
