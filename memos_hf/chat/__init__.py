"""Talking to a model at a terminal, with one cache over all turns."""
