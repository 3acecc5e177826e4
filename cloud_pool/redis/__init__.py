"""What everything in Redis has in common.

config   addresses: one server, Sentinels or a cluster; TLS and users
connect  clients of these
layout   version of the keys
scripts  Lua files
"""
