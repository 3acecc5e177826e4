"""What everything in Redis has in common.

config   addresses: one server, Sentinels or a cluster; TLS and users
connect  clients of these
keys     every key with its owner and its bound
layout   version of the keys
replicas how many must confirm a write
scripts  Lua files
"""
