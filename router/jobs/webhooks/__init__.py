"""Webhooks of jobs, for gateway and device.

address   where they may be sent
payload   what they say
signing   their signature
schedule  when a delivery is repeated
"""
