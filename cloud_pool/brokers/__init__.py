"""Message brokers behind one small port.

port        what a source and a sink of messages can do, and what they must keep
address     `nats://host:port/SUBJECT`, `kafka://host:port/TOPIC`
ranges      FROM..TO of a topic
errors      what can go wrong
open        an address -> its adapter, imported on demand
jetstream   NATS JetStream (extra `nats`)
kafka       Kafka (extra `kafka`)
"""
