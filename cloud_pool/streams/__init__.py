"""A pipeline from topic to topic: messages are OpenAI requests in CloudEvents, and each has one effect.

pipeline      receives, works on many messages at once, drains
settlement    those messages, and each one: run, record, publish in order by key, acknowledge
attempts      one message -> its answer or its error, on the jobs' own runner
outcome       what is published about a message: an answer, its expiry, a dead letter
replay        a range of messages answered again for an audit
effects       what Redis knows of each message, and which process may receive (lua/)
config        the section `streams`
metrics       lag, outcomes, times
"""
