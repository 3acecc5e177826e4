"""`Authorization` → Principal."""

from __future__ import annotations

import hashlib

import pytest

from cloud_pool.accounts.identity.authenticator import Authenticator
from cloud_pool.accounts.identity.principal import ANYONE
from cloud_pool.accounts.identity.static_tokens import StaticToken, StaticTokens
from cloud_pool.http.responses import error_response
from router.errors import AuthenticationFailed, PermissionDenied

from .token_issuer import NOW, Issuer

STATIC = StaticTokens((StaticToken("kiosk", hashlib.sha256(b"secret").digest()),))


def gate(issuer: Issuer, static: StaticTokens) -> Authenticator:
    return Authenticator(static, issuer.verifier(), clock=lambda: 0.0, wall_clock=lambda: NOW)


def test_without_tokens_everyone() -> None:
    """A gateway that asks for no token serves anyone."""
    assert Authenticator(StaticTokens()).principal("") is ANYONE


def test_both_ways(issuer: Issuer) -> None:
    """Static and signed tokens work side by side; the scheme's case does not matter."""
    both = gate(issuer, STATIC)
    assert both.principal("Bearer secret").owner == "default/kiosk"
    assert both.principal(f"bearer {issuer.sign()}").owner == "acme/kiosk-17"


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic secret", "secret", "Bearer wrong"])
def test_nothing_that_is_known(issuer: Issuer, header: str) -> None:
    """No token, another scheme, an unknown one: refused, with static tokens and with signed ones only."""
    for static in (STATIC, StaticTokens()):
        with pytest.raises(AuthenticationFailed):
            gate(issuer, static).principal(header)


def test_keys_alone_let_no_static_token_in(issuer: Issuer) -> None:
    """Without static tokens the gateway is not open."""
    with pytest.raises(AuthenticationFailed):
        gate(issuer, StaticTokens()).principal("Bearer secret")


def test_scopes(issuer: Issuer) -> None:
    """A token does what its scopes say and nothing else; a static one is never an administrator's."""
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
