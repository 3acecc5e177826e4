"""Erase what is stored of a tenant, a device or a user, and prove it.

subject   whose data: a tenant, a device or a user
kinds     what there is, how it is found and how it is erased
erasure   all of it, in an order that a kill may interrupt
receipt   counts and times, signed
"""
