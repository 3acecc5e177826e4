"""The key file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from causeway_server.cloud_pool.accounts.identity.issuing import new_key, read_private, remove_key
from causeway_server.cloud_pool.accounts.identity.key_set import public_jwk, read_jwks
from causeway_server.cloud_pool.accounts.identity.token_verifier import KeySet
from causeway_server.router.errors import ConfigError

from .token_issuer import Issuer


def test_a_key_id_is_its_thumbprint() -> None:
    """The value is RFC 8037's (A.3) for its example."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    raw = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
    assert public_jwk(Ed25519PublicKey.from_public_bytes(raw)).kid == "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k"


def test_private_keys_stay_out_of_the_key_set(issuer: Issuer) -> None:
    assert (issuer.folder / "first.pem").stat().st_mode & 0o777 == 0o600
    assert '"d"' not in issuer.key_file.read_text()
    with pytest.raises(ConfigError, match="exists"):
        new_key(issuer.folder / "first.pem", issuer.key_file)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not a JWKS"),
        ("[]", "not a JWKS"),
        ('{"keys": []}', "no key"),
        ('{"keys": [{"kid": "a", "kty": "RSA", "crv": "Ed25519", "x": ""}]}', "not a JWKS"),
        ('{"keys": [{"kid": "a", "kty": "OKP", "crv": "X25519", "x": ""}]}', "not a JWKS"),
        ('{"keys": [{"kid": "a", "kty": "OKP", "crv": "Ed25519", "x": "AAAA"}]}', "3 bytes"),
        ('{"keys": [{"kid": "a", "kty": "OKP", "crv": "Ed25519", "x": "AAAA", "d": "AAAA"}]}', "private"),
        ('{"keys": [{"kid": "a", "kty": "oct", "k": "c2VjcmV0"}]}', "not a JWKS"),
    ],
)
def test_an_invalid_key_file_is_a_config_error(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why) as caught:
        KeySet(path)
    assert str(path) in str(caught.value)


def test_duplicate_key_ids_are_refused(issuer: Issuer) -> None:
    found = read_jwks(issuer.key_file)
    issuer.key_file.write_bytes(msgspec.json.encode({"keys": [*found.keys, *found.keys]}))
    with pytest.raises(ConfigError, match="Two keys"):
        KeySet(issuer.key_file)


def test_a_broken_change_leaves_the_last_good_keys(issuer: Issuer) -> None:
    keys = KeySet(issuer.key_file)
    kid = public_jwk(issuer.key.public_key()).kid
    good = issuer.key_file.read_bytes()
    issuer.key_file.write_text("{")
    assert keys.get(kid, 10.0) is not None
    assert keys.last_error
    issuer.key_file.unlink()
    assert keys.get(kid, 20.0) is not None
    issuer.key_file.write_bytes(good)
    assert keys.get(kid, 30.0) is not None
    assert not keys.last_error


def test_a_key_is_removed_unless_it_is_the_last(issuer: Issuer) -> None:
    first = public_jwk(issuer.key.public_key()).kid
    with pytest.raises(ConfigError, match="only key"):
        remove_key(issuer.key_file, first)
    issuer.add("second")
    remove_key(issuer.key_file, first)
    assert [key.kid for key in read_jwks(issuer.key_file).keys] != [first]
    with pytest.raises(ConfigError, match="no key"):
        remove_key(issuer.key_file, first)


def test_invalid_private_key_files_are_refused(issuer: Issuer, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    path = tmp_path / "x.pem"
    with pytest.raises(ConfigError, match="No such file"):
        read_private(path)
    path.write_text("rubbish")
    with pytest.raises(ConfigError, match="not an unencrypted private key"):
        read_private(path)
    other = generate_private_key(SECP256R1())
    path.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(ConfigError, match="not contain an Ed25519"):
        read_private(path)
