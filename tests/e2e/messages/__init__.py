"""Anthropic's Messages on edge and gateway, through its official client, with one scripted model behind both."""
