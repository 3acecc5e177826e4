"""Streams side by side: a load generator, the servers behind and beside ours, and other people's proxies."""
