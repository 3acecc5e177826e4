"""Jobs in Redis: `redis_client` runs commands and scripts, `job_store` gives them types, `live_texts` has the text
of running jobs, `late_answers` has those that may be revised, `durability` checks Redis, `usage_outbox` moves bills to
the tenants' usage."""
