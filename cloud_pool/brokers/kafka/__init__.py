"""Kafka, by aiokafka (extra `kafka`).

source    lanes and commits
offsets   which offset of a partition may be committed
sink      publishes each message once
lane      the transactional producer of a lane
history   ranges of a topic, outside of any group
client    what all of them share
"""
