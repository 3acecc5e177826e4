"""Webhooks.

address   where they may be sent
outbox    pending deliveries and signing secrets in Redis
signing   payload and signature
delivery  sending, with retries
"""
