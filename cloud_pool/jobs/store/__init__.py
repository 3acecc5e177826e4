"""Jobs in Redis: `redis_client` runs commands and scripts, `job_store` gives them types, `durability` checks Redis,
`usage_outbox` moves bills to the tenants' usage."""
