"""The content stores of a process."""

from __future__ import annotations

from router.errors import ConfigError

from ..config import FilesConfig
from ..errors import FileStoreUnavailable
from ..redis_client import RedisClient
from .path_content import PathContent
from .port import ContentStore
from .redis_content import RedisContent
from .s3_content import S3Content


class ContentStores:
    """The store that new files go to (`current`), and Redis, where older files may be."""

    def __init__(self, config: FilesConfig, database: RedisClient) -> None:
        """Raises ConfigError for settings that cannot be used."""
        if config.path and config.s3.bucket:
            raise ConfigError("set either path or s3.bucket", where="jobs.files")
        self.current: ContentStore = RedisContent(database)
        self._by_name: dict[str, ContentStore] = {"redis": self.current}
        if config.path:
            self.current = PathContent(config.path)
        elif config.s3.bucket:
            self.current = S3Content(config.s3)
        self._by_name[self.current.name] = self.current

    def named(self, name: str) -> ContentStore:
        """Return the store of a file. Raises FileStoreUnavailable if the configuration does not name it any more."""
        store = self._by_name.get(name)
        if store is None:
            raise FileStoreUnavailable(f"This file is in a store ({name}) that jobs.files does not name any more.")
        return store

    async def close(self) -> None:
        """Close the connections."""
        await self.current.close()
