"""Models held against each other on equal terms, what came of it as tables and pages, the search for settings."""
