"""Sealed blocks: how they are encoded, and the slots they live in."""
