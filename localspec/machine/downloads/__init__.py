"""Fetching models by huggingface_hub, in a process of their own: what, how far, and why not."""
