"""Uploaded files, which their owners can name as parts of requests. The feature is off unless `files.accept` is set.

folder      the files on the disk: written whole or not at all, and overwritten when they are deleted
store       the files of all clients: bounds, owners and expiry, and their bytes in the bodies of requests
api         `/v1/files`
"""
