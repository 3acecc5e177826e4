"""A pipeline from topic to topic: messages are OpenAI requests in CloudEvents, and each has one effect.

app           composition root of `causeway-cloud stream`
pipeline      receives, runs, publishes in order by key, drains
attempts      one message -> its answer or its error, on the jobs' own runner
outcome       what is published about a message: an answer, its expiry, a dead letter
cloud_event   CloudEvents in JSON and MessagePack
effects       what Redis knows of each message, and which process may receive (lua/)
config        the section `streams`
metrics       lag, outcomes, times
"""
