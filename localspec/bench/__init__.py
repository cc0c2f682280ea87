"""Measures what speculation gains on this machine: arms side by side on the same prompts."""
