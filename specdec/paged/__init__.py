"""Paged KV cache and the packed forward, used by target and drafters alike."""
