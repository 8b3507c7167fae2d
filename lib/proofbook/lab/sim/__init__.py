"""Simulated GPU servers: one machine state, rendered into every answer, behind a real SSH server on loopback."""
