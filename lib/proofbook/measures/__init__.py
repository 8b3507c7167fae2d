"""Experiments on a live system that are neither a read nor a change: how fast it answers, and whether it goes on doing so.

A measure says numbers with their conditions, never a verdict. Its requests go through the machine's SSH tunnel to the
service's own port; what came back is kept as evidence, byte for byte, before anything is computed from it.
"""
