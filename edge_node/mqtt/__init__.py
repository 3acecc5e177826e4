"""MQTT as a source of requests: each message on a configured topic is a job, and its answer is published.

    topics      the messages that are accepted, and the topics of answers
    messages    messages and answers on the wire; conversion to jobs and from answers
    connection  one connection to a broker: MQTT 5 by paho, on the event loop
    bridge      reconnects, accepts messages (stored first, then acknowledged, in order), and publishes answers

A message is acknowledged after its job was committed, and an answer counts as sent after the broker acknowledged it. A
message that is lost in between is delivered again: by the broker, as the same job, or by the outbox.
"""
