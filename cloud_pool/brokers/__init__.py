"""Message brokers behind one small port.

port        what a source and a sink of messages can do, what they must keep, and what can go wrong; addresses, as
            `nats://host:port/SUBJECT` and `kafka://host:port/TOPIC`, and FROM..TO of a topic
open        an address -> its adapter, imported on demand
jetstream   NATS JetStream (extra `nats`)
kafka       Kafka (extra `kafka`)
"""
