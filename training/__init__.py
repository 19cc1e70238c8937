"""Makes what a drafter is trained on: conversations that the target writes itself."""
