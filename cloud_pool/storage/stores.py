"""All stores of jobs over one connection pool to Redis."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from .batch_store import BatchStore
from .config import JobsConfig
from .durability import DurabilityCheck
from .encryption import ContentCipher
from .file_contents import ContentStores
from .file_store import FileStore
from .job_store import JobStore
from .outboxes import WebhookOutbox
from .redis_client import RedisClient
from .scripts import REPLICATED, SCRIPTS


class JobStores(msgspec.Struct, frozen=True):
    """The stores of a gateway, a worker or a command."""

    database: RedisClient
    jobs: JobStore
    outbox: WebhookOutbox
    files: FileStore
    batches: BatchStore
    durability: DurabilityCheck
    contents: ContentStores

    @classmethod
    def open(cls, config: JobsConfig, clock: Callable[[], float] | None = None) -> JobStores:
        """Build the stores; they connect on first use. Raises ConfigError for a bad URL, files or keys.

        Args:
            clock: replaces Redis's clock in tests; unix time, s
        """
        database = RedisClient(
            config.redis,
            config.key_prefix,
            SCRIPTS,
            replicas=config.replicas_to_wait_for,
            replica_timeout_s=config.replica_timeout_s,
            replicated=REPLICATED,
            clock=clock,
        )
        return cls.over(database, config)

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
        )

    async def close(self) -> None:
        """Close the connections."""
        await self.database.close()
