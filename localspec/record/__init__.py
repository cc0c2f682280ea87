"""The log in SQLite, its exports and imports.

    store          sessions, messages, turns: each write whole or not at all
    conversations  the list of conversations, imports
    export         CSV, JSONL, Markdown, or a consistent copy of the database
    log_file       reads a log file for training, without opening it as a store

    rows           types of the log and their rows    queries    the longer SQL
    schema         the tables, as migrations          search     the index of texts
    opening        makes a log of any file            kept_settings  by name
    connection     transactions, errors as sentences
    contents       one moment of the log              markdown   the report
    unlogged       texts that are not written         drafted    proposals of a turn, packed

Nothing here knows of engines, models or pages.
"""

import importlib
import sys

# sqlite-utils imports pandas, which Gradio brings, to know its type of a moment. That takes most of
# a second, and no table here has such a column.
if "pandas" not in sys.modules:
    sys.modules["pandas"] = None  # type: ignore[assignment]
    importlib.import_module("sqlite_utils")
    del sys.modules["pandas"]
