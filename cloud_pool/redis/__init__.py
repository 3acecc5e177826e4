"""What everything in Redis has in common.

config   addresses: one server, Sentinels or a cluster; TLS and users
connect  clients of these
eviction whether one forgets keys by itself
keys     every key with its owner and its bound
layout   version of the keys
replicas how many must confirm a write
scripts  Lua files
"""
