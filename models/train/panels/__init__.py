"""Instrument panels, drawn: a picture encoder and a projector that lets a frozen language model read them. Synthetic.

`drawing` draws panels and says what they show, `network` is what is trained, `run` trains it and publishes both files.
"""
