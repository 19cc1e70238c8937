"""Traces and logs: what each request went through, on every hop."""
