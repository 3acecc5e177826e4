"""What everything in Redis has in common.

config   addresses: one server, Sentinels or a cluster; TLS and users
connect  clients of these, and what is wrong with one, also that it forgets keys by itself
keys     every key with its owner and its bound, the version of their layout, and Lua scripts
"""
