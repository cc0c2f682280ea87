"""What localspec remembers: the log in SQLite, and ways to take it elsewhere.

    store       sessions, conversations, turns: written whole or not at all
    export      CSV, JSONL, Markdown, or a consistent copy of the database

    rows        the nouns of the log and how they become rows
    schema      the tables, as migrations        queries     the longer questions
    opening     a file that may be absent, damaged, locked, read-only or newer becomes a log
    connection  one connection for all threads   faults      what an error means to a person
    contents    one moment of the log            markdown    the report
    history     the list of conversations        search      its index, and what was typed
    writes      the steps of a turn              withheld    texts that are not written down
    presets     named settings                   imports     conversations from elsewhere
    copies      the log in another file          drafted     what the rounds proposed

Others use store and export. Nothing here knows of engines, models or pages.
"""
