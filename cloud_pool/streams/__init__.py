"""Pipelines from topic to topic: messages are OpenAI requests in CloudEvents, and each has exactly one effect.

pipeline      receives, works on many messages at once, drains
settlement    the messages in progress, each: run, record, publish in order by key, acknowledge
attempts      runs of one message to its answer or error, on the jobs' own runner
outcome       the published outcome of a message: an answer, its expiry, a dead letter
effects       the state of each message in Redis, and the process that may receive (lua/)
config        the section `streams`
metrics       lag, outcomes, times
"""
