"""The adapter for Kafka, by aiokafka (extra `kafka`).

source    lanes and commits
sink      publishes each message once, by the transactional producers of its lanes
client    connecting, and the classification of errors
"""
