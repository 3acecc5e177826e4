"""All stores of jobs over one connection pool to Redis, and their Lua scripts by name, which need Redis 7.

Each script runs in Redis atomically and can be repeated, since its reply may get lost. `common.lua`, `fair_queue.lua`,
`endings.lua` and `billing.lua` precede every script, `webhooks/delivery.lua` some of those on
webhooks, `batches/files.lua` those on files.

The README lists the keys. Of the hashes:

    job:<id>     `fence` rises with each claim, `cost` is tokens over weight, `reported` the fence of the last report
    webhook:<id> job, owner, url, state, finished, `attempts` made, `fence`
    file:<id>    `users` open batches read it
    batch:<id>   `submitted` lines have become jobs, `ended` of them have ended, the first `collected` lines are in the
                 output files

A full Redis refuses a script that begins with `#!lua` before its first write. These are the scripts that add work:
accept, file_reserve, batch_create, batch_refuse_line, append_text and response_put. All others begin with
`#!lua flags=allow-oom`, because they finish jobs and thereby free memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from causeway_server.router.jobs.job import TRANSITIONS

from ..redis.keys import JOBS_LAYOUT, load_script
from .batch_store import BatchStore
from .config import JobsConfig
from .durability import DurabilityCheck
from .encryption import ContentCipher
from .file_contents import ContentStores
from .file_store import FileStore
from .job_store import JobStore
from .outboxes import WebhookOutbox
from .redis_client import RedisClient
from .response_store import ResponseStore

_LUA: Final = f"{__package__}.lua"
_DELIVERY: Final = load_script(f"{_LUA}.webhooks", "delivery")
_FILES: Final = load_script(f"{_LUA}.batches", "files")
_FORGET: Final = load_script(f"{_LUA}.responses", "forget")
REPLICATED: Final = frozenset({"accept", "file_ready", "batch_create", "response_put"})
"""Scripts whose effect must be on enough replicas before the caller gets the acceptance."""


def transitions_as_lua() -> str:
    """Return the transition table as Lua: `TRANSITIONS[state][event]` is the next state or nil."""
    rows = [
        f"{state.value}={{{','.join(f'{event.value}={to.value!r}' for event, to in row.items())}}}"
        for state, row in TRANSITIONS.items()
    ]
    return f"local TRANSITIONS = {{{','.join(rows)}}}\n"


_COMMON: Final = (
    f"local LAYOUT = '{JOBS_LAYOUT}'\n"
    + transitions_as_lua()
    + "".join(load_script(_LUA, name) for name in ("common", "fair_queue", "endings", "billing"))
)


def _load(folder: str, *names: str, shared: str = "") -> dict[str, str]:
    return {name: load_script(f"{_LUA}.{folder}", name, _COMMON, shared) for name in names}


def load_with_shared(package: str, name: str, *shared: str) -> str:
    """Return a script of another package, preceded by what all scripts of jobs share and the files `shared`."""
    return load_script(package, name, _COMMON, *(load_script(package, each) for each in shared))


SCRIPTS: Final = {
    **_load("transitions", "accept", "claim", "renew_leases", "succeed", "fail", "postpone", "release", "cancel"),
    **_load("transitions", "promote_and_expire", "publish_progress", "append_text"),
    **_load("admin", "revive", "purge", "quarantine", "depths", "unblock_all"),
    **_load("admin", "erase_job", "erase_batch"),
    **_load("webhooks", "webhook_claim", "webhook_finish", "webhook_disabled", "webhook_erase", shared=_DELIVERY),
    **_load("webhooks", "webhook_secrets"),
    **_load("usage", "usage_take", "usage_done"),
    **_load("responses", "response_put", "response_delete", shared=_FORGET),
    **_load("batches", "file_reserve", "file_ready", "file_retire", "files_due", "file_forget", shared=_FILES),
    **_load("batches", "file_usage", "file_page", "batch_create", "batch_transition", "batch_collect", shared=_FILES),
    **_load("batches", "batch_claim", "batch_schedule", "batch_refuse_line", "batch_line_outcomes"),
}


class JobStores(msgspec.Struct, frozen=True):
    """The stores of a gateway, a worker or a command."""

    database: RedisClient
    jobs: JobStore
    outbox: WebhookOutbox
    files: FileStore
    batches: BatchStore
    durability: DurabilityCheck
    contents: ContentStores
    responses: ResponseStore

    @classmethod
    def open(cls, config: JobsConfig, clock: Callable[[], float] | None = None) -> JobStores:
        """Build the stores, which connect on first use. Raises ConfigError. `clock`: for tests, Unix seconds."""
        return cls.over(RedisClient(config, SCRIPTS, replicated=REPLICATED, clock=clock), config)

    @classmethod
    def over(cls, database: RedisClient, config: JobsConfig) -> JobStores:
        """Build the stores over a connection. Raises ConfigError for unusable `jobs.files` or keys."""
        contents = ContentStores(config.files, database)
        cipher = ContentCipher(config.encryption_key_file)
        return cls(
            database,
            JobStore(database, config, cipher),
            WebhookOutbox(database, config.webhooks),
            FileStore(database, config.batches, contents, cipher),
            BatchStore(database, config.batches, cipher),
            DurabilityCheck(database, config.durability, cipher, config.max_record_age_ms),
            contents,
            ResponseStore(database, config.responses, cipher),
        )

    async def close(self) -> None:
        await self.database.close()
