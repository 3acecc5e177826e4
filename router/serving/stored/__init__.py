"""Stored responses and conversations, for device and gateway, over a store and jobs of their own.

ports      what they need: a store, jobs, another server
responses  what a request names is resolved, and what is made of it is stored
api        the handlers over HTTP
"""
