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
_ENDED = (
    "kept for `jobs.result_ttl_s` after the job's end, or for `jobs.dead_letter_ttl_s` if the job is a dead letter; "
    "for a job of a batch, the key is kept as long as the batch's files"
)
_OPEN = "limited by the number of unfinished jobs"
_ONE = "a single number"
_VALUE = "a single value"
_BILLED = "workers empty this key every second"
_BATCHES_KEPT = "a batch is removed after its record has expired, or when it is erased"
_FILES = "limited by the tenant's maximum number of files"
_RECEIVERS = "limited by the number of receivers with pending webhooks"
_SENDING = "limited by the number of webhooks that are being sent"
_RESERVED = "kept until the last reservation ends"
_REFILL = "kept until the bucket is full again"


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
    ("layout", "string", "fixed", _ONE, "version of the format of all keys and records of jobs"),
    ("replicated", "string", "fixed", _VALUE, "an empty value, which is written before each Redis command WAIT"),
    ("accepted", "string", "fixed", _ONE, "number of all jobs that were ever accepted"),
    ("tiers", "set", "fixed", "limited by the number of tiers", "names of the tiers that ever had a job"),
    (
        "content_keys",
        "zset",
        "fixed",
        "ids of keys that were not used for a long time are removed",
        "ids of encryption keys, ordered by the time of their last use",
    ),
    ("job:<id>", "hash", "ends", _ENDED, "record of the job"),
    ("result:<id>", "string", "ttl", _ENDED, "body of the job's answer"),
    ("events:<id>", "stream", "ends", f"about 100 events; {_ENDED}", "events of the job"),
    (
        "text:<id>",
        "stream",
        "ttl",
        "kept for two minutes; at most 262,144 characters",
        "text of the job's answer, while a client follows the job",
    ),
    ("followed:<id>", "string", "ttl", "kept for 10 s", "mark that a client follows the job's events"),
    ("erasure:<digest>", "hash", "ttl", "kept for 30 days", "progress of an erasure that has no receipt yet"),
    ("idempotency:<owner>:<digest>", "hash", "ends", _ENDED, "the job that was accepted with an Idempotency-Key"),
    (
        "queue:<tier>:<priority>",
        "hash",
        "fixed",
        "two numbers",
        "number of queued jobs of all tenants, and the counter (virtual time) that orders the turns of the tenants",
    ),
    ("queue:<tier>:<priority>:<tenant>", "zset", "ends", _OPEN, "queued jobs of the tenant"),
    (
        "turns:<tier>:<priority>",
        "zset",
        "ends",
        "limited by the number of tenants with queued jobs",
        "tenants with queued jobs that take turns; the tenant with the lowest counter value (virtual time) is next",
    ),
    (
        "tags:<tier>:<priority>",
        "zset",
        "ttl",
        "kept for an hour",
        "tenants that take no turns at present, each with the counter value (virtual time) of its next turn",
    ),
    (
        "leases:<tier>:<priority>",
        "zset",
        "ends",
        "limited by the number of running jobs",
        "running jobs, ordered by the time at which their worker's lease ends",
    ),
    ("wake:<tier>", "list", "fixed", "at most 64 tokens", "tokens, each of which wakes a worker that waits for jobs"),
    ("waiting", "zset", "ends", _OPEN, "jobs that wait for a retry, ordered by the time of their next attempt"),
    ("deadlines", "zset", "ends", _OPEN, "unfinished jobs, ordered by their deadline"),
    (
        "blocked",
        "zset",
        "ends",
        "a tenant is removed when the limit is reset",
        "tenants whose jobs wait because the tenant is over a rate or budget",
    ),
    (
        "trials",
        "zset",
        "ends",
        "a tenant is removed 5 s after the reset of the limit",
        "tenants whose limit was just reset; their jobs start one at a time",
    ),
    ("open:<tenant>", "zset", "ends", _OPEN, "unfinished jobs of the tenant"),
    (
        "open_bytes",
        "hash",
        "ends",
        "limited by the number of tenants with unfinished jobs",
        "size of the requests of unfinished jobs in bytes, per tenant",
    ),
    (
        "ended:<tenant>",
        "zset",
        "ttl",
        "limited by `jobs.max_ended` and `jobs.max_ended_bytes`",
        "ended jobs of the tenant, ordered by the time at which they expire",
    ),
    ("ended_bytes:<tenant>", "string", "ttl", _ONE, "size of the tenant's ended jobs in bytes"),
    ("jobs:<owner>", "zset", "ttl", "a job is removed when its record has certainly expired", "all jobs of the owner"),
    (
        "usage",
        "hash",
        "ends",
        _BILLED,
        "usage of finished runs of jobs that workers have not yet added to the usage of the tenants",
    ),
    (
        "usage_batch",
        "hash",
        "ends",
        _BILLED,
        "the part of `<jobs>:usage` that a worker is adding to the usage of the tenants",
    ),
    ("dead", "stream", "fixed", "about `jobs.max_dead_letters` entries", "dead letters"),
    (
        "response:<id>",
        "hash",
        "ttl",
        "kept for `jobs.responses.ttl_s`",
        "a stored response, or a conversation with its turns",
    ),
    (
        "responses:<tenant>",
        "zset",
        "ttl",
        "limited by `jobs.responses.max_responses` and `jobs.responses.max_bytes`",
        "stored responses of the tenant, ordered by the time at which they expire",
    ),
    (
        "response_bytes:<tenant>",
        "hash",
        "ttl",
        "limited like the key `<jobs>:responses:<tenant>`",
        "size in bytes of each stored response of the tenant, and the total size of these responses",
    ),
)
_WEBHOOKS = _keys(
    "storage",
    "<jobs>:",
    (
        "webhook:<id>",
        "hash",
        "ends",
        "removed after the last attempt to send the webhook, at most about four days after the job's end",
        "a pending webhook",
    ),
    (
        "webhooks",
        "zset",
        "ends",
        "limited by the number of tenants with pending webhooks",
        "tenants with pending webhooks, ordered by the time at which a worker looks at the tenant next",
    ),
    (
        "webhooks:<tenant>",
        "zset",
        "ends",
        _RECEIVERS,
        "receivers of the tenant's webhooks, ordered by the time at which a worker looks at the receiver next",
    ),
    (
        "webhooks:<tenant>:<receiver>",
        "zset",
        "ends",
        "limited by the number of pending webhooks",
        "pending webhooks to the receiver, ordered by the time at which they are due",
    ),
    ("webhook_sending:<tenant>", "hash", "ends", _SENDING, "the receiver of each webhook that is being sent"),
    (
        "webhook_leases:<tenant>",
        "zset",
        "ends",
        _SENDING,
        "webhooks that a worker is sending, ordered by the time at which the worker's lease ends",
    ),
    (
        "webhook_receiver:<tenant>:<receiver>",
        "hash",
        "ends",
        "kept while the receiver has pending webhooks",
        "number of webhooks that are being sent to the receiver, and state of its circuit breaker",
    ),
    (
        "webhook_receivers",
        "zset",
        "ends",
        _RECEIVERS,
        "receivers, ordered by the time at which the pause of their circuit breaker ends",
    ),
    ("webhooks_pending", "string", "fixed", _ONE, "number of pending webhooks"),
    (
        "webhook_disabled:<owner>:<sha1>",
        "string",
        "ttl",
        "kept for `jobs.webhooks.disable_after_410_s`",
        "a URL that answered 410 Gone",
    ),
    ("webhook_secret:<owner>", "hash", "ttl", "kept for 400 days after the last use", "secrets that sign webhooks"),
)
_BATCHES = _keys(
    "storage",
    "<jobs>:",
    (
        "file:<id>",
        "hash",
        "ends",
        "kept for `jobs.batches.file_ttl_s`, and while an open batch reads the file",
        "record of the file",
    ),
    ("file:<id>:parts", "list", "ends", "kept as long as the file's record", "name and size of each part of the file"),
    (
        "content:<id>",
        "hash",
        "ends",
        "kept as long as the file's record; `jobs.batches.max_redis_bytes` limits the total size per tenant",
        "content of the file, if Redis stores it",
    ),
    (
        "content_bytes",
        "hash",
        "fixed",
        "limited by the number of stores",
        "total size of the content of files in bytes, per store (Redis, folder or S3)",
    ),
    ("files:<owner>", "zset", "ends", _FILES, "files of the owner"),
    ("file_bytes:<tenant>", "zset", "ends", _FILES, "files of the tenant, with their size in bytes"),
    (
        "file_due",
        "zset",
        "ends",
        "limited by the number of files",
        "files, ordered by the time at which their content is deleted",
    ),
    ("batch:<id>", "hash", "ends", "kept for `jobs.batches.file_ttl_s` after the batch's end", "record of the batch"),
    (
        "batches",
        "zset",
        "ends",
        "limited by the number of open batches",
        "open batches, ordered by the time of their next step",
    ),
    ("batches:<owner>", "zset", "ttl", _BATCHES_KEPT, "batches of the owner"),
    (
        "tenant_batches:<tenant>",
        "zset",
        "ttl",
        _BATCHES_KEPT,
        "batches that count against the tenant's limit, ordered by the time at which they stop counting",
    ),
)
_STREAMS = _keys(
    "streams",
    "<jobs>:",
    (
        "stream:<pipeline>",
        "string",
        "ttl",
        "kept for `streams.lease_s`",
        "the process that receives the messages of the pipeline",
    ),
    (
        "effect:<pipeline>:<digest>",
        "hash",
        "ttl",
        "kept for `streams.effect_ttl_s`",
        "whether the outcome of a message is already recorded or published",
    ),
)
_IDENTITY = _keys(
    "accounts/identity",
    "causeway:{revoked}:",
    ("version", "string", "fixed", _ONE, "a number that grows with each revocation"),
    ("nonce", "string", "fixed", _VALUE, "a random value that changes with each revocation"),
    (
        "epoch",
        "string",
        "fixed",
        _ONE,
        "a number that grows each time that a gateway restores revocations that Redis has lost",
    ),
    ("tokens", "zset", "fixed", "a token is removed when it has expired", "revoked tokens"),
    (
        "devices",
        "hash",
        "fixed",
        "a device is removed after the longest lifetime of a token",
        "devices whose tokens are revoked",
    ),
)
_API_KEYS = _keys(
    "accounts/identity",
    "causeway:{apikeys}:",
    (
        "keys",
        "hash",
        "fixed",
        "limited by `identity.api_keys.max_per_tenant`",
        "API keys, with digests of their secrets",
    ),
    ("nonce", "string", "fixed", _VALUE, "a random value that changes when an API key is made or changed"),
    ("used", "hash", "fixed", "limited by the number of API keys", "time at which each API key was last used"),
)
_TENANTS = _keys(
    "accounts/tenants",
    "causeway:tenant:{<tenant>}:",
    ("requests", "hash", "ttl", _REFILL, "token buckets that limit the tenant's requests and its POSTs of jobs"),
    ("tokens", "hash", "ttl", _REFILL, "token bucket that limits the tenant's input and output tokens"),
    (
        "usage:<day>",
        "hash",
        "ttl",
        "kept for `tenants.usage_retention_days`",
        "the tenant's usage on that day, by tier and route",
    ),
    ("budget", "hash", "ttl", _RESERVED, "maximum cost of each of the tenant's requests in progress (reservation)"),
    ("budget:ends", "zset", "ttl", _RESERVED, "the requests in progress, ordered by the end of their reservation"),
    (
        "batch:<id>",
        "string",
        "ttl",
        "kept for a day",
        "mark that a process has already added this part of the usage to the tenant's usage",
    ),
    ("charge:<id>", "string", "ttl", "kept for two minutes", "mark that a request was charged to the token buckets"),
)
_SHARED = (
    *_keys(
        "accounts",
        "causeway:",
        (
            "layout",
            "string",
            "fixed",
            _ONE,
            "version of the format of the Redis keys for revocations, usage and limits",
        ),
    ),
    *_keys(
        "accounts/tenants",
        "causeway:",
        ("tenants:gateways", "zset", "ttl", "kept for seconds", "the gateways that are running"),
    ),
    *_keys(
        "tiers",
        "causeway:variants:{<digest>}:",
        (
            "counts",
            "hash",
            "ttl",
            "kept until an hour after the last process with this variant ended",
            "answers and errors that were counted for the trial of a variant",
        ),
        (
            "batch:<id>",
            "string",
            "ttl",
            "kept for ten minutes",
            "mark that a process has already added these new counts to the key `counts` of the trial",
        ),
    ),
    *_keys(
        "tiers",
        "causeway:feedback",
        (
            "",
            "stream",
            "ttl",
            "about 1,000 scores; kept for an hour after the newest score",
            "clients' scores for answers that were made by another gateway than the one that received the score",
        ),
        (
            ":<id>",
            "string",
            "ttl",
            "kept for a minute",
            "reply to a client's score, which the gateway that made the answer stores here",
        ),
    ),
    *_keys(
        "degradation",
        "causeway:",
        (
            "sessions:{<digest>}",
            "zset",
            "ttl",
            "limited by `degradation.sessions.max_per_tenant`",
            "the part `<key>` of the names of a tenant's session keys (next row), ordered by the time of the last turn",
        ),
        (
            "sessions:{<digest>}:<key>",
            "string",
            "ttl",
            "kept for `degradation.sessions.ttl_s`",
            "state of a session, without content",
        ),
    ),
    *_keys(
        "admission",
        "causeway:",
        (
            "permits:<tier>:<digest>",
            "hash",
            "ttl",
            "kept for a minute",
            "gateways and workers that share the tier's permits, and how many permits each of them could use",
        ),
    ),
)
_CACHE = _keys(
    "cache",
    "<cache>:{<digest>}:",
    ("entry", "hash", "ttl", "kept for `cache.ttl_s` + `cache.stale_if_error_s`", "a cached answer"),
    ("lease:<rank>", "hash", "ttl", "kept for a minute", "the gateway that is generating the answer"),
    (
        "flow:<rank>:<fence>",
        "stream",
        "ttl",
        "kept for a minute; limited by `cache.max_buffer_bytes`",
        "an answer that is being generated",
    ),
)
REDIS_KEYS: Final = (*_JOBS, *_WEBHOOKS, *_BATCHES, *_STREAMS, *_SHARED, *_IDENTITY, *_API_KEYS, *_TENANTS, *_CACHE)
"""All keys, by owner."""


def declared(key: str) -> tuple[RedisKey, ...]:
    """Return the patterns that a key with the default prefixes matches: exactly one for each key that we write."""
    return tuple(each for each in REDIS_KEYS if each.matches(key, jobs="causeway:jobs", cache="causeway:cache"))
