"""The list of all keys in Redis with owner, type and bound, for the page's table. A test finds keys that are missing
here, or grow.

`<jobs>` and `<cache>` stand for `jobs.key_prefix` and `cache.key_prefix`; an owner of jobs is `tenant/device`.

    ttl     the key has a time to live at all times
    ends    the key is removed, or gets a time to live, when its subject ends; everything has a deadline
    fixed   a fixed number of keys, one for the deployment, a tier or a priority; `bound` says what bounds their size
"""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

KeyBound = Literal["ttl", "ends", "fixed"]
KeyType = Literal["string", "hash", "list", "set", "zset", "stream"]
_PLACEHOLDER = re.compile(r"<(\w+)>")
_TEXTS = {"receiver": ".+", "rank": "[^:]*"}
_ENDED = "`result_ttl_s` after the job's end; `dead_letter_ttl_s` for a dead letter; for a batch's line as its files"
_OPEN = "unfinished jobs"
_QUOTA = "removed with the record, or by a quota"


class RedisKey(msgspec.Struct, frozen=True):
    """A pattern of keys. `<name>` stands for any text without a colon."""

    pattern: str
    type: KeyType
    owner: str  # package that writes the key
    kind: KeyBound
    bound: str
    meaning: str

    def matches(self, key: str, *, jobs: str, cache: str) -> bool:
        """Return whether `key` matches the pattern. `jobs` and `cache` are the configured prefixes."""
        known = _TEXTS | {"jobs": re.escape(jobs), "cache": re.escape(cache)}
        parts = _PLACEHOLDER.split(self.pattern)
        texts = (re.escape(text) if at % 2 == 0 else known.get(text, "[^:]+") for at, text in enumerate(parts))
        return re.fullmatch("".join(texts), key) is not None


def _keys(owner: str, prefix: str, *rows: tuple[str, KeyType, KeyBound, str, str]) -> tuple[RedisKey, ...]:
    return tuple(RedisKey(prefix + row[0], row[1], owner, row[2], row[3], row[4]) for row in rows)


_JOBS = _keys(
    "storage",
    "<jobs>:",
    ("layout", "string", "fixed", "one number", "version of the keys and records of jobs"),
    ("replicated", "string", "fixed", "one value", "an empty value, written before WAIT"),
    ("accepted", "string", "fixed", "one number", "number of jobs that were ever accepted"),
    ("tiers", "set", "fixed", "tiers", "tiers that ever had a job"),
    ("content_keys", "zset", "fixed", "trimmed by age", "ids of encryption keys by their last use"),
    ("job:<id>", "hash", "ends", _ENDED, "the job's record"),
    ("result:<id>", "string", "ttl", _ENDED, "body of the answer"),
    ("events:<id>", "stream", "ends", f"about 100 events; {_ENDED}", "events of a job"),
    ("text:<id>", "stream", "ttl", "two minutes; 262,144 characters", "text of the answer, while it is followed"),
    ("followed:<id>", "string", "ttl", "10 s", "mark that a client follows the job's events"),
    ("erasure:<digest>", "hash", "ttl", "30 days", "progress of an erasure that has no receipt yet"),
    ("idempotency:<owner>:<digest>", "hash", "ends", _ENDED, "job of an Idempotency-Key"),
    ("queue:<tier>:<priority>", "hash", "fixed", "two numbers", "number of all tenants' jobs, and the virtual time"),
    ("queue:<tier>:<priority>:<tenant>", "zset", "ends", _OPEN, "a tenant's queued jobs"),
    ("turns:<tier>:<priority>", "zset", "ends", "tenants with queued jobs", "tenants by their tag"),
    ("tags:<tier>:<priority>", "zset", "ttl", "an hour", "tags of tenants that take no turns"),
    ("leases:<tier>:<priority>", "zset", "ends", "running jobs", "jobs by the end of their lease"),
    ("wake:<tier>", "list", "fixed", "64 tokens", "tokens that wake workers that wait for jobs"),
    ("waiting", "zset", "ends", _OPEN, "jobs by the time of their next attempt"),
    ("deadlines", "zset", "ends", _OPEN, "jobs by their deadline"),
    ("blocked", "zset", "ends", "until their limit is reset", "tenants over a rate or budget"),
    ("trials", "zset", "ends", "5 s after the reset", "tenants after the reset; their jobs first start one at a time"),
    ("open:<tenant>", "zset", "ends", _OPEN, "a tenant's unfinished jobs"),
    ("open_bytes", "hash", "ends", "tenants with unfinished jobs", "bytes of the requests of unfinished jobs"),
    ("ended:<tenant>", "zset", "ttl", "`max_ended`, `max_ended_bytes`", "a tenant's ended jobs by their expiry"),
    ("ended_bytes:<tenant>", "string", "ttl", "one number", "bytes of a tenant's ended jobs"),
    ("jobs:<owner>", "zset", "ttl", "removed when the record cannot exist any more", "all jobs of an owner"),
    ("usage", "hash", "ends", "workers move them every second", "amounts that accepted reports have billed"),
    ("usage_batch", "hash", "ends", "workers move them every second", "the part of these amounts that is being moved"),
    ("dead", "stream", "fixed", "about `max_dead_letters`", "dead letters"),
    ("response:<id>", "hash", "ttl", "`jobs.responses.ttl_s`", "a stored response, or a conversation with its turns"),
    ("responses:<tenant>", "zset", "ttl", "`max_responses`, `max_bytes`", "a tenant's responses by their expiry"),
    ("response_bytes:<tenant>", "hash", "ttl", "as `responses`", "bytes of each response, and of all of the tenant"),
)
_WEBHOOKS = _keys(
    "storage",
    "<jobs>:",
    ("webhook:<id>", "hash", "ends", "the last attempt, after about four days", "a delivery"),
    ("webhooks", "zset", "ends", "tenants with deliveries", "tenants by the time at which a claim checks them next"),
    (
        "webhooks:<tenant>",
        "zset",
        "ends",
        "receivers with deliveries",
        "receivers by the time at which a claim checks them next",
    ),
    ("webhooks:<tenant>:<receiver>", "zset", "ends", "deliveries", "deliveries by due time"),
    ("webhook_sending:<tenant>", "hash", "ends", "deliveries being sent", "receivers of the deliveries"),
    (
        "webhook_leases:<tenant>",
        "zset",
        "ends",
        "deliveries being sent",
        "claimed deliveries by the end of their lease",
    ),
    ("webhook_receiver:<tenant>:<receiver>", "hash", "ends", "the receiver's deliveries", "slots and circuit breaker"),
    ("webhook_receivers", "zset", "ends", "receivers with deliveries", "receivers by the end of their pause"),
    ("webhooks_pending", "string", "fixed", "one number", "number of deliveries"),
    ("webhook_disabled:<owner>:<sha1>", "string", "ttl", "`disable_after_410_s`", "a URL that answered 410 Gone"),
    ("webhook_secret:<owner>", "hash", "ttl", "400 days after the last use", "an owner's signing secrets"),
)
_BATCHES = _keys(
    "storage",
    "<jobs>:",
    ("file:<id>", "hash", "ends", "`file_ttl_s`, and open batches that read it", "a file's record"),
    ("file:<id>:parts", "list", "ends", "as the file", "name and bytes of the file's parts"),
    ("content:<id>", "hash", "ends", "as the file; quotas", "content of a file in Redis"),
    ("content_bytes", "hash", "fixed", "content stores", "bytes by content store"),
    ("files:<owner>", "zset", "ends", "quota of files", "an owner's files"),
    ("file_bytes:<tenant>", "zset", "ends", "quota of files", "a tenant's files by bytes"),
    ("file_due", "zset", "ends", "files", "files by the time at which their content is deleted"),
    ("batch:<id>", "hash", "ends", "`file_ttl_s` after the batch's end", "a batch's record"),
    ("batches", "zset", "ends", "open batches", "batches by their next step"),
    ("batches:<owner>", "zset", "ttl", _QUOTA, "an owner's batches"),
    ("tenant_batches:<tenant>", "zset", "ttl", _QUOTA, "batches of a tenant by the time until which they count"),
)
_STREAMS = _keys(
    "streams",
    "<jobs>:",
    ("stream:<pipeline>", "string", "ttl", "`streams.lease_s`", "process that receives for a pipeline"),
    ("effect:<pipeline>:<digest>", "hash", "ttl", "`streams.effect_ttl_s`", "state of a message"),
)
_IDENTITY = _keys(
    "accounts/identity",
    "causeway:{revoked}:",
    ("version", "string", "fixed", "one number", "a number that grows with each revocation"),
    ("nonce", "string", "fixed", "one value", "a nonce that changes with each revocation"),
    ("epoch", "string", "fixed", "one number", "a number that grows when a loss was repaired"),
    ("tokens", "zset", "fixed", "removed when the tokens have expired", "revoked tokens"),
    ("devices", "hash", "fixed", "removed after the longest lifetime of a token", "revoked devices"),
)
_API_KEYS = _keys(
    "accounts/identity",
    "causeway:{apikeys}:",
    ("keys", "hash", "fixed", "`api_keys.max_per_tenant`", "API keys, with digests of their secrets"),
    ("nonce", "string", "fixed", "one value", "a nonce that changes with each API key"),
    ("used", "hash", "fixed", "as the keys", "when each API key was used last"),
)
_TENANTS = _keys(
    "accounts/tenants",
    "causeway:tenant:{<tenant>}:",
    ("requests", "hash", "ttl", "until the bucket is full", "token buckets of requests and of submissions"),
    ("tokens", "hash", "ttl", "until the bucket is full", "token bucket of tokens"),
    ("usage:<day>", "hash", "ttl", "`usage_retention_days`", "usage of a day by tier and route"),
    ("budget", "hash", "ttl", "the longest reservation", "maximum cost of the requests in progress"),
    ("budget:ends", "zset", "ttl", "the longest reservation", "reservations by their end"),
    ("batch:<id>", "string", "ttl", "a day", "mark that usage was added"),
    ("charge:<id>", "string", "ttl", "two minutes", "mark that a charge was made to the buckets"),
)
_SHARED = (
    *_keys("accounts", "causeway:", ("layout", "string", "fixed", "one number", "version of the keys of accounts")),
    *_keys(
        "accounts/tenants", "causeway:", ("tenants:gateways", "zset", "ttl", "seconds", "gateways that are running")
    ),
    *_keys(
        "tiers",
        "causeway:variants:{<digest>}:",
        ("counts", "hash", "ttl", "an hour after the last process that has the variant", "counts of a variant's trial"),
        ("batch:<id>", "string", "ttl", "ten minutes", "mark that counts were added"),
    ),
    *_keys(
        "tiers",
        "causeway:feedback",
        ("", "stream", "ttl", "about 1,000 scores; an hour after the newest", "scores for answers of any gateway"),
        (":<id>", "string", "ttl", "a minute", "reply of the gateway that made the answer"),
    ),
    *_keys(
        "degradation",
        "causeway:",
        ("sessions:{<digest>}", "zset", "ttl", "`max_per_tenant`", "keys of a tenant's sessions by their last turn"),
        ("sessions:{<digest>}:<key>", "string", "ttl", "`ttl_s`", "state of a session"),
    ),
    *_keys("admission", "causeway:", ("permits:<tier>:<digest>", "hash", "ttl", "a minute", "peers and their demand")),
)
_CACHE = _keys(
    "cache",
    "<cache>:{<digest>}:",
    ("entry", "hash", "ttl", "`ttl_s` + `stale_if_error_s`", "a stored answer"),
    ("lease:<rank>", "hash", "ttl", "a minute", "gateway that generates the answer"),
    ("flow:<rank>:<fence>", "stream", "ttl", "a minute; `max_buffer_bytes`", "an answer in progress"),
)
REDIS_KEYS: Final = (*_JOBS, *_WEBHOOKS, *_BATCHES, *_STREAMS, *_SHARED, *_IDENTITY, *_API_KEYS, *_TENANTS, *_CACHE)
"""All keys, by owner."""


def declared(key: str) -> tuple[RedisKey, ...]:
    """Return the patterns that a key with the default prefixes matches: exactly one for each key that we write."""
    return tuple(each for each in REDIS_KEYS if each.matches(key, jobs="causeway:jobs", cache="causeway:cache"))
