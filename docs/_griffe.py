"""An extension of griffe, which reads docstrings for the site: examples in them become blocks of code."""

import re

import griffe

EXAMPLE = re.compile(r"^( *)(>>>.*(?:\n(?!\n).+)*)", re.M)  # to the next empty line


class Examples(griffe.Extension):
    """Puts a fence around every paragraph that begins with >>>, for Markdown takes it for a quotation."""

    def on_object(self, *, obj, **kwargs):
        """Rewrite the docstring before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"\1```pycon\n\1\2\n\1```", obj.docstring.value)
