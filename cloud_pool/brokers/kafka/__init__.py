"""Kafka, by aiokafka (extra `kafka`).

source    lanes, commits, and ranges beside them
sink      publishes each message once, by the transactional producers of its lanes
client    connecting, and the classification of errors
"""
