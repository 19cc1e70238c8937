"""Models: finding, checking and loading them."""
