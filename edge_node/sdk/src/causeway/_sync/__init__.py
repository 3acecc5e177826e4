"""The sync client, generated from the async client by generate_sync.py: do not edit."""
