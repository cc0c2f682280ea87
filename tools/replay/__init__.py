"""Replays a log under other controllers, offline: where the choice of a drafter gains or loses.

run       a log in, a table of policies out      logged    its rounds as worlds
play      one policy through one world           worlds    what is right where, and what it costs
"""
