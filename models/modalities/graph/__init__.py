"""The encoder graph of a request, the same on a device and in the cloud: `graph` runs a `branch` for each part,
which remembers what was found; `facts` tell it to a model, and `late` reads on after the request was answered.
`speech_detection` detects speech in live sessions.
"""
