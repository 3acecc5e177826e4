"""Webhooks of jobs; `router.jobs.webhooks` says where they may go, what they say and how they are signed.

outbox    pending deliveries and signing secrets in Redis
delivery  sending, with retries
"""
