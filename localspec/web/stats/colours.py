"""The colour of each way of drafting in the plots, one for all of them.

Contract: names that are not here get one of the theme's own.
"""

COLOURS = {
    "draft_model": "#0d9488",
    "draft_tree": "#0284c7",
    "ngram": "#7c3aed",
    "lookahead": "#a855f7",
    "chained": "#2563eb",
    "self_quant": "#d97706",
    "early_exit": "#b45309",
    "medusa": "#db2777",
    "mtp": "#be123c",
    "eagle": "#dc2626",
    "cross_tokenizer": "#65a30d",
    "off": "#64748b",
}
