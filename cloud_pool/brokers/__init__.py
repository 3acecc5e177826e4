"""Message brokers behind one small port.

port             what a source and a sink of messages can do, and what they must keep
address          `nats://host:port/SUBJECT`
errors           what can go wrong
open             an address -> its adapter, imported on demand
nats_jetstream   NATS JetStream (extra `nats`)
"""
