"""Trains drafts and heads for any target, on the target's own answers.

Contract: `commands` is the command line. A kind of head is one file with a `Recipe`: its weights,
its loss and its held-out acceptance. `train_loop` trains every recipe alike.
"""
