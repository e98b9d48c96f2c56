"""Shared rooms of the EAGLE-3 pipeline: what more than one stage needs."""

__version__ = "0.1.0"
