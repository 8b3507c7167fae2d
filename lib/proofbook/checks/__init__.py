"""Expectations held against what probes saw. Pure: no check knows a host or a transport; each names the probes it needs.

Three habits run through all of them. An observation that is needed and missing makes UNKNOWN, never PASS; it does not
hide a fault that another observation shows. What cannot be observed on this machine is NOT_CHECKED, with the reason. And
nothing is judged whole that was seen in part: "0 of 0 are bad" is UNKNOWN.
"""
