"""Signed tokens: valid ones, and every forgery."""

from __future__ import annotations

import hashlib
import hmac
import json
import tempfile
from functools import lru_cache
from pathlib import Path

import jwt
import jwt.types
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.cloud_pool.accounts.identity.key_set import Jwks, public_jwk, read_jwks
from causeway_server.cloud_pool.accounts.identity.token_verifier import Claims, TokenVerifier
from causeway_server.router.errors import AuthenticationFailed
from causeway_server.router.serving.responses import error_response

from .token_issuer import CLAIMS, NOW, Issuer, part


def refusal_of(verifier: TokenVerifier, token: str, *, at: float = NOW) -> str:
    """The message of the refusal, which is OpenAI's error object with 401."""
    with pytest.raises(AuthenticationFailed) as caught:
        verifier.verify(token, now=0.0, now_unix=at)
    answer = error_response(caught.value)
    assert answer.status == 401
    assert isinstance(answer.body, bytes)
    error = json.loads(answer.body)["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert len(token) < 8 or token not in error["message"]
    return str(error["message"])


def test_a_valid_token_gives_its_claims(issuer: Issuer) -> None:
    principal = issuer.verifier().verify(issuer.sign(), now=0.0, now_unix=NOW).principal()
    assert principal.owner == "acme/kiosk-17"
    assert principal.scopes == {"chat", "jobs"}
    assert principal.token_id == "token-1"


def test_pyjwt_verifies_the_same_tokens(issuer: Issuer) -> None:
    token = issuer.sign()
    any_time: jwt.types.Options = {"verify_exp": False, "verify_nbf": False, "verify_iat": False}
    read = jwt.decode(token, issuer.key.public_key(), ["EdDSA"], audience="causeway-cloud", options=any_time)
    assert read == CLAIMS


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ({"iss": "somebody"}, "an issuer that this gateway does not accept"),
        ({"aud": "another-service"}, "another service"),
        ({"aud": ["x", "y"]}, "another service"),
        ({"nbf": NOW + 31}, "not valid yet"),
        ({"iat": NOW - 91 * 86400}, "lifetime exceeds"),
        ({"iat": NOW + 31, "exp": NOW + 60}, "in the future"),
        ({"exp": NOW - 30}, "expired"),
        ({"exp": ...}, "exp"),
        ({"nbf": ...}, "nbf"),
        ({"iat": ...}, "iat"),
        ({"jti": ...}, "jti"),
        ({"sub": ...}, "sub"),
        ({"tenant": ...}, "tenant"),
        ({"exp": "tomorrow"}, "exp"),
        ({"exp": True}, "exp"),
        ({"exp": None}, "exp"),
        ({"tenant": "a/b"}, "tenant"),
        ({"tenant": "acme\n"}, "tenant"),
        ({"sub": "x" * 65}, "sub"),
        ({"sub": ""}, "sub"),
        ({"scope": ["chat"]}, "scope"),
    ],
)
def test_invalid_claims_are_refused_with_a_reason(issuer: Issuer, claims: dict[str, object], why: str) -> None:
    assert why in refusal_of(issuer.verifier(), issuer.sign(claims))


def test_claims_that_are_not_an_object_are_refused(issuer: Issuer) -> None:
    verifier = issuer.verifier()
    for payload in ([1], 7, b"", b"[" * 2000, b'{"exp": NaN}', b'{"exp": 1e999}', b"\xff\xfe"):
        refusal_of(verifier, issuer.sign(payload))


@pytest.mark.parametrize("exp", [b"NaN", b"Infinity", b"1e999"])
def test_times_that_are_not_numbers_are_refused(issuer: Issuer, exp: bytes) -> None:
    text = json.dumps({**CLAIMS, "exp": 0}).encode().replace(b'"exp": 0', b'"exp": ' + exp)
    refusal_of(issuer.verifier(), issuer.sign(text))


def test_clock_skew_is_tolerated_up_to_its_limit(issuer: Issuer) -> None:
    token = issuer.sign()
    verifier = issuer.verifier()
    verifier.verify(token, now=0.0, now_unix=NOW - 30.0)
    verifier.verify(token, now=0.0, now_unix=NOW + 3629.0)
    refusal_of(verifier, token, at=NOW + 3630.0)
    refusal_of(verifier, token, at=NOW - 30.1)


def test_an_unknown_key_is_refused(issuer: Issuer) -> None:
    """Also under the id of a known one."""
    stranger = Ed25519PrivateKey.generate()
    ours = public_jwk(issuer.key.public_key()).kid
    assert "key that signed the token is unknown" in refusal_of(issuer.verifier(), issuer.sign(key=stranger))
    assert "signature" in refusal_of(issuer.verifier(), issuer.sign(key=stranger, head={"kid": ours}))


def test_a_changed_token_is_refused(issuer: Issuer) -> None:
    head, _, signature = issuer.sign().split(".")
    forged = part({**CLAIMS, "tenant": "other"})
    verifier = issuer.verifier()
    for token in (f"{head}.{forged}.{signature}", f"{head}.{forged}.", f"{head}.{forged}.{signature[:-4]}"):
        assert "signature" in refusal_of(verifier, token)


def test_other_algorithms_are_refused(issuer: Issuer) -> None:
    """`none` in every spelling, and HMAC with the public key as its secret."""
    public = issuer.key.public_key()
    kid = public_jwk(public).kid
    verifier = issuer.verifier()
    for alg in ("none", "None", "NONE", "", "eddsa", "Ed448", "HS256", "RS256", "ES256"):
        head = part({"alg": alg, "kid": kid})
        secret = public.public_bytes_raw()
        signed = f"{head}.{part(CLAIMS)}"
        code = part(hmac.digest(secret, signed.encode(), hashlib.sha256))
        assert "EdDSA" in refusal_of(verifier, f"{signed}.{code}")
        assert "EdDSA" in refusal_of(verifier, f"{signed}.")


def test_keys_in_the_header_are_ignored(issuer: Issuer) -> None:
    stranger = Ed25519PrivateKey.generate()
    own = msgspec.to_builtins(public_jwk(stranger.public_key()))
    brought: dict[str, object] = {
        "jwk": own,
        "jku": "http://127.0.0.1:1/keys",
        "x5u": "http://127.0.0.1:1",
        "x5c": ["x"],
    }
    assert "key that signed the token is unknown" in refusal_of(
        issuer.verifier(), issuer.sign(key=stranger, head=brought)
    )
    ours = public_jwk(issuer.key.public_key()).kid
    assert "signature" in refusal_of(issuer.verifier(), issuer.sign(key=stranger, head={**brought, "kid": ours}))


@pytest.mark.parametrize(
    "head",
    [{"crit": ["exp"]}, {"crit": []}, {"kid": 7}, {"kid": None}, {"alg": ["EdDSA"]}, {"kid": "../../etc/passwd"}],
)
def test_invalid_headers_are_refused(issuer: Issuer, head: dict[str, object]) -> None:
    refusal_of(issuer.verifier(), issuer.sign(head=head))


def test_malformed_tokens_are_refused(issuer: Issuer) -> None:
    whole = issuer.sign()
    deep = part(b"[" * 2900)
    verifier = issuer.verifier()
    for token in (
        "",
        "eyJ",
        "..",
        whole + ".x",
        f"{deep}.x.x",
        whole.replace(".", ".!", 1),
        "eyJ\udce9.a.b",
        f"{whole.split('.')[0]}.\udce9.x",
        f"{whole.split('.')[0]}.é.x",
        "eyJ=.=.=",
    ):
        refusal_of(verifier, token)


@pytest.mark.slow
@given(data=st.data())
def test_any_mutation_is_refused_or_says_what_was_signed(data: st.DataObject) -> None:
    verifier, whole, signed = _signed()
    at = data.draw(st.integers(0, len(whole)))
    cut = data.draw(st.integers(0, 3))
    put = data.draw(st.text(alphabet=st.sampled_from("AQgw_-.=!é\x00\udce9"), max_size=4))
    changed = whole[:at] + put + whole[at + cut :]
    try:
        assert verifier.verify(changed, now=0.0, now_unix=NOW) == signed
    except AuthenticationFailed:
        assert changed != whole


@lru_cache
def _signed() -> tuple[TokenVerifier, str, Claims]:
    with tempfile.TemporaryDirectory() as folder:
        issuer = Issuer(Path(folder))
        verifier, whole = issuer.verifier(), issuer.sign()
        return verifier, whole, verifier.verify(whole, now=0.0, now_unix=NOW)


@pytest.mark.slow
def test_an_oversized_token_is_refused(issuer: Issuer) -> None:
    """For its length alone, even if it is valid."""
    room = issuer.config.max_token_bytes
    fits = max(n for n in range(1, room) if len(issuer.sign({"pad": "x" * n})) <= room)
    verifier = issuer.verifier()
    verifier.verify(issuer.sign({"pad": "x" * fits}), now=0.0, now_unix=NOW)
    assert "bytes; at most" in refusal_of(verifier, issuer.sign({"pad": "x" * (fits + 3)}))


def test_a_remembered_token_expires(issuer: Issuer) -> None:
    token, verifier = issuer.sign(), issuer.verifier()
    assert verifier.verify(token, now=0.0, now_unix=NOW) is verifier.verify(token, now=0.0, now_unix=NOW + 1)
    assert len(verifier) == 1
    assert "expired" in refusal_of(verifier, token, at=NOW + 3700)


def test_refused_tokens_are_not_remembered(issuer: Issuer) -> None:
    verifier = issuer.verifier()
    refusal_of(verifier, issuer.sign({"aud": "x"}))
    assert len(verifier) == 0


def test_the_least_recently_used_token_is_forgotten(issuer: Issuer) -> None:
    issuer.config = msgspec.structs.replace(issuer.config, token_cache_size=2)
    verifier = issuer.verifier()
    for number in range(5):
        verifier.verify(issuer.sign({"jti": f"t{number}"}), now=0.0, now_unix=NOW)
    assert len(verifier) == 2


def test_keys_rotate(issuer: Issuer) -> None:
    """A removed key's tokens are refusal_of, remembered or not."""
    verifier = issuer.verifier()
    old = issuer.sign()
    verifier.verify(old, now=0.0, now_unix=NOW)
    second = issuer.add("second")
    new = issuer.sign(key=second)
    assert "key that signed the token is unknown" in refusal_of(verifier, new)  # the file is read again after a second
    verifier.verify(new, now=1.0, now_unix=NOW)
    verifier.verify(old, now=1.0, now_unix=NOW)
    left = [key for key in read_jwks(issuer.key_file).keys if key.kid == public_jwk(second.public_key()).kid]
    issuer.key_file.write_bytes(msgspec.json.encode(Jwks(tuple(left))))
    verifier.verify(new, now=2.0, now_unix=NOW)
    with pytest.raises(AuthenticationFailed, match="key that signed the token is unknown"):
        verifier.verify(old, now=2.0, now_unix=NOW)
