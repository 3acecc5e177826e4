"""The broker of pipelines, NATS JetStream (extra `nats`).

topics      addresses of topics, messages, logins and errors; importing it needs no client library
jetstream   sources and sinks of messages
"""
