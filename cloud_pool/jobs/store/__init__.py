"""Jobs in Redis: `redis_client` runs commands and scripts, `job_store` gives them types, `live_texts` has the text
of running jobs, `durability` checks Redis, `usage_outbox` moves bills to the tenants' usage."""
