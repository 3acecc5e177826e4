"""Audio and images of requests: untrusted bytes → samples and pixels → facts as text.

    decoding/   audio to samples, images to pixels; the only code that reads a client's bytes
    encoders/   samples and pixels to facts, by models that the owner brings
    graph/      the encoders of one request, side by side; `installed` finds those of this machine
    process/    the child processes in which this runs: bounded in memory and time, and replaced when they die
    voices      Piper voices that an owner adds, and phonemes; `synthesizer` speaks them, in a child

Nothing here is imported by the daemon before the first request with such a part, except the messages.
"""
