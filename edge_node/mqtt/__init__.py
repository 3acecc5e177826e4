"""MQTT as a way in and out: each message on a configured topic is a job, and its answer is published.

topics      which messages are taken, and where answers may go
messages    both as they are on the wire, also as CloudEvents; a message as a job, and a job's answer as a message
connection  one connection to a broker: MQTT 5 by paho, on the event loop
bridge      connects again and again, takes messages (stored first, acknowledged after that, in order), and publishes
            answers

A message is acknowledged after its job was committed, and an answer is done after the broker acknowledged it. What is
lost in between comes again: from the broker, where it is the same job, or from the outbox.
"""
