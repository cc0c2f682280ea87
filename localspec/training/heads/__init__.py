"""Heads and drafts for a target that is already there, trained on its own answers.

Contract: `recipe` says what a kind of head brings (its weights, its loss, its acceptance); the
training loop knows nothing else of it. One file a kind.
"""
