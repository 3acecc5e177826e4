"""Content of files behind one small port: a file is an ordered list of parts of a few MiB, each written whole or not.

port           the protocol that all three stores follow
redis_content  in Redis, for small content
path_content   a folder that gateways and workers share
s3_content     a bucket behind the S3 API
stores         the store that the configuration names, and those that older files are in

Records, quotas and expiry of files are `file_store`'s, in Redis. It lists a part only after it was written, so
a writer that dies leaves nothing that a reader could see.
"""
