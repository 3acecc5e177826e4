"""Signed tokens: what is believed, and each forgery that is not."""

from __future__ import annotations

import hashlib
import hmac
import json
import tempfile
from functools import lru_cache
from pathlib import Path

import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud_pool.accounts.identity.claims import Claims
from cloud_pool.accounts.identity.key_set import Jwks, public_jwk, read_jwks
from cloud_pool.accounts.identity.token_verifier import TokenVerifier
from cloud_pool.http.responses import error_response
from router.errors import AuthenticationFailed

from .token_issuer import CLAIMS, NOW, Issuer, part


def refused(verifier: TokenVerifier, token: str, *, at: float = NOW) -> str:
    """Why; and the refusal is OpenAI's error object with 401."""
    with pytest.raises(AuthenticationFailed) as caught:
        verifier.verify(token, now=0.0, now_unix=at)
    answer = error_response(caught.value)
    assert answer.status == 401
    assert isinstance(answer.body, bytes)
    error = json.loads(answer.body)["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert len(token) < 8 or token not in error["message"]
    return str(error["message"])


def test_an_honest_token(issuer: Issuer) -> None:
    """A token of ours says its tenant, its device, its scopes and its id."""
    principal = issuer.verifier().verify(issuer.sign(), now=0.0, now_unix=NOW).principal()
    assert principal.owner == "acme/kiosk-17"
    assert principal.scopes == {"chat", "jobs"}
    assert principal.token_id == "token-1"


def test_another_library_reads_it_alike(issuer: Issuer) -> None:
    """What we verify, PyJWT verifies too: the format is the standard's."""
    token = issuer.sign()
    any_time = {"verify_exp": False, "verify_nbf": False, "verify_iat": False}
    read = jwt.decode(token, issuer.key.public_key(), ["EdDSA"], audience="causeway-cloud", options=any_time)
    assert read == CLAIMS


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ({"iss": "somebody"}, "another issuer"),
        ({"aud": "another-service"}, "another service"),
        ({"aud": ["x", "y"]}, "another service"),
        ({"nbf": NOW + 31}, "not valid yet"),
        ({"iat": NOW - 91 * 86400}, "longer than is allowed"),
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
def test_claims_that_do_not_fit(issuer: Issuer, claims: dict[str, object], why: str) -> None:
    """A good signature over claims that are foreign, over, early, missing or malformed is refused, and why is said."""
    assert why in refused(issuer.verifier(), issuer.sign(claims))


def test_claims_that_are_no_object(issuer: Issuer) -> None:
    """A signed list, number, nothing, or a thousand brackets is refused."""
    verifier = issuer.verifier()
    for payload in ([1], 7, b"", b"[" * 2000, b'{"exp": NaN}', b'{"exp": 1e999}', b"\xff\xfe"):
        refused(verifier, issuer.sign(payload))


@pytest.mark.parametrize("exp", [b"NaN", b"Infinity", b"1e999"])
def test_times_that_are_no_numbers(issuer: Issuer, exp: bytes) -> None:
    """A token cannot live for ever by an end that is no number."""
    text = json.dumps({**CLAIMS, "exp": 0}).encode().replace(b'"exp": 0', b'"exp": ' + exp)
    refused(issuer.verifier(), issuer.sign(text))


def test_clocks_may_differ_a_little(issuer: Issuer) -> None:
    """Within the skew a token is taken early and late; a hair beyond, refused."""
    token = issuer.sign()
    verifier = issuer.verifier()
    verifier.verify(token, now=0.0, now_unix=NOW - 30.0)
    verifier.verify(token, now=0.0, now_unix=NOW + 3629.0)
    refused(verifier, token, at=NOW + 3630.0)
    refused(verifier, token, at=NOW - 30.1)


def test_a_foreign_key(issuer: Issuer) -> None:
    """A key that we do not know is refused, also under the name of one that we know."""
    stranger = Ed25519PrivateKey.generate()
    ours = public_jwk(issuer.key.public_key()).kid
    assert "key is not known" in refused(issuer.verifier(), issuer.sign(key=stranger))
    assert "signature" in refused(issuer.verifier(), issuer.sign(key=stranger, head={"kid": ours}))


def test_a_changed_token(issuer: Issuer) -> None:
    """Claims exchanged under an old signature, a cut signature and none are refused."""
    head, _, signature = issuer.sign().split(".")
    forged = part({**CLAIMS, "tenant": "other"})
    verifier = issuer.verifier()
    for token in (f"{head}.{forged}.{signature}", f"{head}.{forged}.", f"{head}.{forged}.{signature[:-4]}"):
        assert "signature" in refused(verifier, token)


def test_no_algorithm_but_ours(issuer: Issuer) -> None:
    """`none` in every spelling, and HMAC with our public key as its secret, are refused before any key is touched."""
    public = issuer.key.public_key()
    kid = public_jwk(public).kid
    verifier = issuer.verifier()
    for alg in ("none", "None", "NONE", "", "eddsa", "Ed448", "HS256", "RS256", "ES256"):
        head = part({"alg": alg, "kid": kid})
        secret = public.public_bytes_raw()
        signed = f"{head}.{part(CLAIMS)}"
        code = part(hmac.digest(secret, signed.encode(), hashlib.sha256))
        assert "EdDSA" in refused(verifier, f"{signed}.{code}")
        assert "EdDSA" in refused(verifier, f"{signed}.")


def test_a_key_that_the_token_brings(issuer: Issuer) -> None:
    """`jwk`, `jku`, `x5u` and `x5c` in the head are not read: the stranger's key stays unknown."""
    stranger = Ed25519PrivateKey.generate()
    own = msgspec.to_builtins(public_jwk(stranger.public_key()))
    brought: dict[str, object] = {
        "jwk": own,
        "jku": "http://127.0.0.1:1/keys",
        "x5u": "http://127.0.0.1:1",
        "x5c": ["x"],
    }
    assert "key is not known" in refused(issuer.verifier(), issuer.sign(key=stranger, head=brought))
    ours = public_jwk(issuer.key.public_key()).kid
    assert "signature" in refused(issuer.verifier(), issuer.sign(key=stranger, head={**brought, "kid": ours}))


@pytest.mark.parametrize(
    "head",
    [{"crit": ["exp"]}, {"crit": []}, {"kid": 7}, {"kid": None}, {"alg": ["EdDSA"]}, {"kid": "../../etc/passwd"}],
)
def test_heads_that_do_not_fit(issuer: Issuer, head: dict[str, object]) -> None:
    """Extensions that must be understood, and a key's name that is none, are refused."""
    refused(issuer.verifier(), issuer.sign(head=head))


def test_what_is_no_token(issuer: Issuer) -> None:
    """Too few or many parts, other letters, bytes that no header should hold, deep nesting: refused, never a fault."""
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
        refused(verifier, token)


@given(data=st.data())
@settings(max_examples=300)
def test_any_change_of_a_token(data: st.DataObject) -> None:
    """Whatever letters are changed, added or taken out: a token is refused, or says what was signed."""
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


def test_an_oversized_token(issuer: Issuer) -> None:
    """One byte over the limit is refused for its length alone, even if everything about it is right."""
    room = issuer.config.max_token_bytes
    fits = max(n for n in range(1, room) if len(issuer.sign({"pad": "x" * n})) <= room)
    verifier = issuer.verifier()
    verifier.verify(issuer.sign({"pad": "x" * fits}), now=0.0, now_unix=NOW)
    assert "too long" in refused(verifier, issuer.sign({"pad": "x" * (fits + 3)}))


def test_what_was_verified_still_expires(issuer: Issuer) -> None:
    """A remembered token is remembered once, and refused from its end on."""
    token, verifier = issuer.sign(), issuer.verifier()
    assert verifier.verify(token, now=0.0, now_unix=NOW) is verifier.verify(token, now=0.0, now_unix=NOW + 1)
    assert len(verifier) == 1
    assert "expired" in refused(verifier, token, at=NOW + 3700)


def test_refused_tokens_are_not_remembered(issuer: Issuer) -> None:
    """Whoever sends rubbish fills nothing."""
    verifier = issuer.verifier()
    refused(verifier, issuer.sign({"aud": "x"}))
    assert len(verifier) == 0


def test_memory_is_bounded(issuer: Issuer) -> None:
    """The least recently used token makes room."""
    issuer.config = msgspec.structs.replace(issuer.config, token_cache_size=2)
    verifier = issuer.verifier()
    for number in range(5):
        verifier.verify(issuer.sign({"jti": f"t{number}"}), now=0.0, now_unix=NOW)
    assert len(verifier) == 2


def test_rotation(issuer: Issuer) -> None:
    """Old and new keys work side by side; when the old one goes, its tokens go, remembered or not."""
    verifier = issuer.verifier()
    old = issuer.sign()
    verifier.verify(old, now=0.0, now_unix=NOW)
    second = issuer.add("second")
    new = issuer.sign(key=second)
    assert "key is not known" in refused(verifier, new)  # within the second that the file is trusted
    verifier.verify(new, now=1.0, now_unix=NOW)
    verifier.verify(old, now=1.0, now_unix=NOW)
    left = [key for key in read_jwks(issuer.key_file).keys if key.kid == public_jwk(second.public_key()).kid]
    issuer.key_file.write_bytes(msgspec.json.encode(Jwks(tuple(left))))
    verifier.verify(new, now=2.0, now_unix=NOW)
    with pytest.raises(AuthenticationFailed, match="key is not known"):
        verifier.verify(old, now=2.0, now_unix=NOW)
