"""NATS JetStream, by nats-py (extra `nats`).

source       messages in order, again after each loss
sink         publishes, and looks for what was published
history      ranges of a subject, beside all pipelines
connection   opened again whenever it is lost
"""
