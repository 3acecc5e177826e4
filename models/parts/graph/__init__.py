"""The encoder graph of a request, the same on a device and in the cloud. `graph` runs a `branch` for each part; a
branch caches its results, and may continue to read after the request was answered.
"""
