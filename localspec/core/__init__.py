"""Nouns, seams, errors, units and formulas that every wing shares. It imports nothing of ours.

`decoding` holds what the engine and the drafters exchange, `backend` what the page and an engine
exchange: the protocols Drafter and Backend are the two seams of the program. Nothing here imports
torch, gradio or a database. `bootstrap` needs the standard library only.
"""
