"""Download of models: from a hub repository or a URL (hub), or from packages (demo).

`plan` parses the source that the owner typed, and checks name, disk and memory before the download. The result becomes
an artifact through `models.publish.add`.
"""
