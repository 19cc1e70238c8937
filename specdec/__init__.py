"""Shared parts of the speculative-decoding services."""
