"""Who may talk to the page, and what a browser may do with it."""
