"""Multi-token prediction: what must hold before it is turned on, whether it took effect, whether it helps, and what follows."""
