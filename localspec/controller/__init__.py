"""What a round costs, what of a draft is accepted, and what to do next.

It imports no model and no engine: it sees steps and gives plans (arXiv 2211.17192, section 3.3, for
the rate that it maximises).
"""
