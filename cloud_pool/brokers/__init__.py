"""Message brokers behind one small interface.

port        interfaces and guarantees of sources and sinks, with their errors; addresses, such as
            `nats://host:port/SUBJECT` and `kafka://host:port/TOPIC`
open        opens the adapter of an address, imported on demand
jetstream   NATS JetStream (extra `nats`)
kafka       Kafka (extra `kafka`)
"""
