"""The key set's file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cloud_pool.accounts.identity.issuing import new_key, read_private, remove_key
from cloud_pool.accounts.identity.key_set import KeySet, public_jwk, read_jwks
from router.errors import ConfigError

from .token_issuer import Issuer


def test_a_known_thumbprint() -> None:
    """A key's name is its thumbprint: the value that RFC 8037 (A.3) gives for its example."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    raw = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
    assert public_jwk(Ed25519PublicKey.from_public_bytes(raw)).kid == "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k"


def test_private_keys_stay_private(issuer: Issuer) -> None:
    """The private file is its owner's alone, and the key set holds no private part."""
    assert (issuer.folder / "first.pem").stat().st_mode & 0o777 == 0o600
    assert '"d"' not in issuer.key_file.read_text()
    with pytest.raises(ConfigError, match="exists"):
        new_key(issuer.folder / "first.pem", issuer.key_file)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not a set"),
        ("[]", "not a set"),
        ('{"keys": []}', "no key"),
        ('{"keys": [{"kid": "a", "kty": "RSA", "crv": "Ed25519", "x": ""}]}', "not a set"),
        ('{"keys": [{"kid": "a", "kty": "OKP", "crv": "X25519", "x": ""}]}', "not a set"),
        ('{"keys": [{"kid": "a", "kty": "OKP", "crv": "Ed25519", "x": "AAAA"}]}', "3 bytes"),
        ('{"keys": [{"kid": "a", "kty": "OKP", "crv": "Ed25519", "x": "AAAA", "d": "AAAA"}]}', "private"),
        ('{"keys": [{"kid": "a", "kty": "oct", "k": "c2VjcmV0"}]}', "not a set"),
    ],
)
def test_a_bad_file_stops_the_start(tmp_path: Path, text: str, why: str) -> None:
    """Foreign kinds of keys, short ones, private ones and none: refused with the file's name."""
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why) as caught:
        KeySet(path)
    assert str(path) in str(caught.value)


def test_two_of_one_name(issuer: Issuer) -> None:
    """The same name twice is refused: which one is meant?"""
    found = read_jwks(issuer.key_file)
    issuer.key_file.write_bytes(msgspec.json.encode({"keys": [*found.keys, *found.keys]}))
    with pytest.raises(ConfigError, match="two keys"):
        KeySet(issuer.key_file)


def test_a_broken_change_leaves_the_last_good_keys(issuer: Issuer) -> None:
    """A file that breaks or goes while the gateway runs changes nothing but `fault`; a repaired one is taken."""
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


def test_removing(issuer: Issuer) -> None:
    """A key can be taken out, but not the last one, and not one that is not there."""
    first = public_jwk(issuer.key.public_key()).kid
    with pytest.raises(ConfigError, match="last key"):
        remove_key(issuer.key_file, first)
    issuer.add("second")
    remove_key(issuer.key_file, first)
    assert [key.kid for key in read_jwks(issuer.key_file).keys] != [first]
    with pytest.raises(ConfigError, match="no key"):
        remove_key(issuer.key_file, first)


def test_private_files_that_are_none(issuer: Issuer, tmp_path: Path) -> None:
    """Rubbish, nothing, and another kind of key are refused with the file's name."""
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    path = tmp_path / "x.pem"
    with pytest.raises(ConfigError, match="No such file"):
        read_private(path)
    path.write_text("rubbish")
    with pytest.raises(ConfigError, match="not a private key"):
        read_private(path)
    other = generate_private_key(SECP256R1())
    path.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(ConfigError, match="not an Ed25519"):
        read_private(path)
