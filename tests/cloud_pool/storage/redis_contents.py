"""Everything that the job store has in Redis, read back."""

from __future__ import annotations

from causeway_server.cloud_pool.storage.redis_client import RedisClient, Reply, as_bytes, as_list, as_text

_READ = {
    "string": ("GET",),
    "hash": ("HGETALL",),
    "list": ("LRANGE", 0, -1),
    "set": ("SMEMBERS",),
    "zset": ("ZRANGE", 0, -1),
    "stream": ("XRANGE", "-", "+"),
}


async def contents(database: RedisClient, pattern: str = "") -> dict[str, bytes]:
    """Return the value of each key below the prefix, or of `pattern`, its parts one after the other."""
    found, cursor = {}, "0"
    while True:
        reply = await database.command("SCAN", cursor, "MATCH", pattern or f"{database.prefix}:*", "COUNT", 1000)
        cursor = as_text(as_list(reply)[0])
        for name in as_list(as_list(reply)[1]):
            key = as_text(name)
            command, *arguments = _READ[as_text(await database.command("TYPE", key))]
            found[key] = _flat(await database.command(str(command), key, *arguments))
        if cursor == "0":
            return found


def _flat(reply: Reply) -> bytes:
    return b"\n".join(map(_flat, reply)) if isinstance(reply, list) else as_bytes(reply)
