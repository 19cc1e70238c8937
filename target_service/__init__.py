"""The target service: paged KV cache, verification, acceptance, rollback."""
