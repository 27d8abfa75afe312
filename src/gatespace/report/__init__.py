"""The report of a study: tables, figures and one page."""
