"""What knowing who asks costs a request: a signed token that was seen before, and one that was not."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from causeway_server.cloud_pool.accounts.identity.authenticator import Authenticator, StaticTokens
from causeway_server.cloud_pool.accounts.identity.config import IdentityConfig
from causeway_server.cloud_pool.accounts.identity.issuing import issue, new_key, read_private
from causeway_server.cloud_pool.accounts.identity.revocation import RevocationList
from causeway_server.cloud_pool.accounts.identity.token_verifier import KeySet, TokenVerifier

from .rows import Row, scaled

ROUNDS, TIMES = 15, 400


def main() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        private, keys = Path(folder) / "key.pem", Path(folder) / "keys.json"
        new_key(private, keys)
        token, _ = issue(
            read_private(private),
            tenant="acme",
            device="kiosk",
            scopes=("chat", "jobs"),
            issuer="causeway",
            audience="causeway-cloud",
            now=time.time(),
            lifetime_s=3600.0,
        )
        header = f"Bearer {token}"
        seen, unseen = (
            Authenticator(StaticTokens(), TokenVerifier(config, KeySet(keys)), RevocationList(config, None))
            for config in (IdentityConfig(), IdentityConfig(token_cache_size=0))
        )
        known, fresh = [], []
        for _ in range(ROUNDS):  # in turn, so that a machine that is busy elsewhere is busy for both
            known.append(_each_us(lambda: seen.principal(header), TIMES))
            fresh.append(_each_us(lambda: unseen.principal(header), TIMES // 10))
    known_us, fresh_us = statistics.median(known), statistics.median(fresh)
    note = f"the check of a new token takes {fresh_us / known_us:.0f} times as long"
    return [
        scaled("check of a signed access token that was seen before, in yardsticks", known_us, 4.0, note),
        scaled("check of a new signed access token, in yardsticks", fresh_us, 60.0),
    ]


def _each_us(call: Callable[[], object], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times * 1e6
