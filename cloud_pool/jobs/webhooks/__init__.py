"""Webhooks of jobs; `router.jobs.webhooks` says where they may go, what they say and how they are signed.

outbox    pending deliveries and signing secrets in Redis, for the sender of `router.serving.webhooks`
"""
