"""The orchestrator: Generate, the rounds, the batches, the stop rules."""
