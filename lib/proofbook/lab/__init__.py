"""Machines to practise on: they look to a runbook like real ones, and are reached the same way, over SSH."""
