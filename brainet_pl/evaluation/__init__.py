"""What a test leaves behind: metrics, the record of every set, curves, figures, tables and the page."""
