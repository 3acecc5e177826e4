"""Erase what is stored of a tenant, a device or a user, and prove it.

erasure   what there is by kind, how it is found, and erasing all of it in an order that a kill may interrupt
receipt   whose data it was, counts and times, signed
"""
