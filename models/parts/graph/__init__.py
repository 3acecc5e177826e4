"""The encoder graph of a request, the same on a device and in the cloud: `graph` runs a `branch` for each part, which
remembers what was found, and reads on after the request was answered, and tells the facts to a model.
"""
