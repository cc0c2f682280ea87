"""Ways of guessing tokens: one file each, listed in `registry`."""
