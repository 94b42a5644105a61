"""Hooks of mkdocs: the notebooks of examples/notebooks as pages of the site, and a site that asks nothing of a network.

Markdown cells stand as they are, code cells become blocks, what they printed follows as a plain block, and what they
drew as pictures. Nothing is executed here (`tests/test_notebooks.py` does that), and nothing but mkdocs is needed.

Columns of numbers are aligned at their right edges, so that decimals stand below each other.

The theme would fetch a script that makes search work in a folder of pages; `_worker.js` stands in its place.
"""

import base64
import json
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
FETCHED = "https://unpkg.com/iframe-worker/shim"
WORKER = "assets/javascripts/worker.js"
NUMBER = re.compile(r"\**[-+−]?[\d,]*\.?\d+( ± [\d,]*\.?\d+)?( %)?\**")


def pages(path):
    """A notebook → its page as Markdown, and its pictures by the names they have beside the page."""
    lines, pictures = [], {}
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            lines.append(source)
            continue
        lines.append(f"```python\n{source}\n```")
        printed = "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")
        if printed:
            lines.append(f"```text\n{printed.rstrip()}\n```")
        for output in cell["outputs"]:
            drawn = output.get("data", {}).get("image/png")
            if drawn:
                name = f"{path.stem}_{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode("".join(drawn))
                lines.append(f"![What the block above draws]({name})")
    said = run_with(notebook["metadata"]["measured"])
    lines.append(f"*This page is the notebook `examples/notebooks/{path.name}`, as it was run last: {said}.*")
    return "\n\n".join(lines) + "\n", pictures


def run_with(measured):
    """The version that a notebook was run with, and whether structures or heads have changed since."""
    folder = str(FOLDER.parents[1] / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    from common.pages import measured_with
    from common.store import numbers_of_code

    return measured_with([measured], numbers_of_code())


def on_files(files, config):
    """Add a page for each notebook, notebooks/NAME.md, and the changelog."""
    from mkdocs.structure.files import File

    for path in sorted(FOLDER.glob("*.ipynb")):
        text, pictures = pages(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    changes = (FOLDER.parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
    changes = changes.replace("](docs/", "](../").replace("[security](SECURITY.md)", "security: SECURITY.md")
    files.append(File.generated(config, "reference/changelog.md", content=changes))
    return files


def align_numbers(markdown):
    """Tables, with columns that hold numbers alone aligned to the right; a number and its ± are never parted."""
    return re.sub(r"^\|.*\|\n\|[-:| ]+\|\n(?:\|.*\|\n?)+", lambda match: _aligned(match[0]), markdown, flags=re.M)


def _aligned(table):
    header, rule, *rows = table.rstrip("\n").split("\n")
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]
    rules = rule.strip("|").split("|")
    for i in range(len(rules)):
        column = [row[i] for row in cells if i < len(row) and row[i] not in ("", "–")]
        if column and all(map(NUMBER.fullmatch, column)):
            rules[i] = "---:"
    rows = [row.replace(" ± ", "\u00a0±\u00a0") for row in rows]
    return "\n".join([header, f"|{'|'.join(rules)}|", *rows]) + "\n" * table.endswith("\n")


def together(markdown):
    """Numbers with a percent sign that no line is broken between; blocks and pieces of code stay as they are."""
    parts = re.split(r"(```.*?```|`[^`\n]*`)", markdown, flags=re.S)
    return "".join(part if i % 2 else re.sub(r"(\d) %", "\\1\u00a0%", part) for i, part in enumerate(parts))


def on_page_markdown(markdown, **_):
    """Align numbers in tables, and keep a number and its % on one line.

    A link to a notebook, which a reader of the repository follows, becomes one to its page; other files of the
    repository are no pages, and a link to one becomes its name and path.
    """
    markdown = together(align_numbers(markdown))
    markdown = re.sub(r"\(\.\./((?:\.\./)*)examples/notebooks/(\w+)\.ipynb\)", r"(\1notebooks/\2.md)", markdown)
    return re.sub(r"\[`?([^\]`]+)`?\]\((?:\.\./)+([^)]+\.py)\)", r'<code title="\2">\1</code>', markdown)


def on_post_build(config):
    """Let every page take the script beside it instead of one from a network."""
    site = Path(config["site_dir"])
    (site / WORKER).write_text(Path(__file__).with_name("_worker.js").read_text(encoding="utf-8"), encoding="utf-8")
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        up = "../" * (len(page.relative_to(site).parts) - 1)
        page.write_text(text.replace(FETCHED, up + WORKER), encoding="utf-8")
