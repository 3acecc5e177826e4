"""The Redis, the clock and the stores of the job tests."""

from tests.cloud_pool.jobs.conftest import clock, config, database, new_job, redis_server, store, stores

__all__ = ["clock", "config", "database", "new_job", "redis_server", "store", "stores"]
