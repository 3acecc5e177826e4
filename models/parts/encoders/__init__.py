"""Encoders, which turn samples and pixels into facts with models that the owner installs. Each runs as a worker of
`models.parts.process`.
"""
