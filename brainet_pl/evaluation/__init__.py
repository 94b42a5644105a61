"""What a test found, and how it is shown: the record of a run and the page made of it."""
