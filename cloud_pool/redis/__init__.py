"""Access to Redis, which all rooms share.

config   addresses: one server, Sentinels or a cluster; TLS and users
connect  clients of these, and the diagnosis of faults, such as eviction of keys
keys     every key with its owner and its bound, the version of their layout, and Lua scripts
"""
