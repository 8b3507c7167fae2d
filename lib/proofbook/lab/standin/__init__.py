"""A stand-in for SGLang's server: what it says, answers, takes and breaks, by release. No GPU, no model.

``engine.Server`` is one server without any I/O: the simulated lab runs it on its own clock, and :mod:`process` runs it as a
real process with a real port under a real systemd. Everything here is standard library alone, imports nothing from outside
this folder, and is copied to machines as it is (Python 3.11 or later).

What the texts and formulas follow are the released packages 0.5.9 to 0.5.23; the numbers are plausible for four GPUs of
96 GB, and prove nothing about real ones.
"""
