"""Made-up worlds in which the controller is tried: what is right where, and what rounds cost.

world     a text, its drafters and its costs    made_up    the worlds, by kind
play      one policy through one world          contest    policies over several worlds
"""
