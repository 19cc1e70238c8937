"""The draft service: drafters that propose tokens with their distributions."""
