"""The colour of each way of drafting in the plots, one for all of them.

Contract: each stands out by at least 3 to 1 from a light page and from a dark one, and no two lie
near each other. Names that are not here get one of the theme's own.
"""

COLOURS = {
    "draft_model": "#007896",
    "draft_tree": "#2d5aff",
    "ngram": "#a500ff",
    "lookahead": "#b478f0",
    "chained": "#00a500",
    "self_quant": "#e17800",
    "early_exit": "#876900",
    "medusa": "#ff4b96",
    "mtp": "#a54b96",
    "eagle": "#e1000f",
    "cross_tokenizer": "#ff00ff",
    "off": "#879696",
}
