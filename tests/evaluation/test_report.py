"""The page of a run: what it says, and how a real headless browser shows it."""

import base64
import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from brainet_pl.cli import main
from brainet_pl.report import read_run, render, write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FIGURES = (
    "test/reliability",
    "test/risk_coverage",
    "test/passes",
    "ood/held_out/histograms",
    "ood/held_out/curves",
    "structure/tree",
)


class Page(html.parser.HTMLParser):
    """Tags with attributes, and whether every tag that was opened is closed."""

    EMPTY = ("meta", "link", "img", "br")

    def __init__(self, text):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def all(self, name):
        return [attributes for tag, attributes in self.tags if tag == name]


def test_the_page_holds_every_figure_and_number(run, capsys):
    main(["report", str(run)])
    path = run / "report.html"
    assert str(path) in capsys.readouterr().out
    text = path.read_text()
    page = Page(text)
    stored = json.loads((run / "dashboard.json").read_text())
    assert [figure["name"] for figure in stored["figures"]] == list(FIGURES)
    sources = [image["src"] for image in page.all("img")]
    for figure in stored["figures"]:
        data = (run / "figures" / figure["file"]).read_bytes()
        assert "data:image/png;base64," + base64.b64encode(data).decode() in sources
        assert any(image["alt"] == figure["alt"] for image in page.all("img"))
    assert len(sources) == len(FIGURES) + 4 + 1  # figures, thumbnails, training curves
    assert f"{100 * stored['metrics']['test/cls/Acc']:.2f} %" in text
    assert f"{100 * stored['metrics']['ood/held_out/entropy/AUROC']:.2f} %" in text
    assert read_run(run).ggt.fingerprint in text
    for name in stored["metrics"]:
        if name.startswith("test/"):
            assert name in text


def test_the_page_is_accessible_and_asks_for_nothing(run):
    text = render(read_run(run))
    page = Page(text)
    assert page.all("html")[0]["lang"] == "en"
    assert all(image["alt"].strip() for image in page.all("img"))
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.all("img"))
    assert len(page.all("caption")) == len(page.all("table")) >= 4
    assert all(cell.get("scope") in ("row", "col") for cell in page.all("th"))
    assert {link["href"][1:] for link in page.all("a")} <= {tag.get("id") for _, tag in page.tags}
    assert not page.all("script")
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:|#)""", text)
    assert "url(" not in text
    assert "@import" not in text


def contrast(a, b):
    """WCAG's contrast ratio of two colours #rrggbb."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_text_has_contrast_in_both_modes(run):
    modes = [
        dict(re.findall(r"--(\w+): (#\w{6})", block))
        for block in re.findall(r":root \{(.*?)\}", render(read_run(run)), re.S)
    ]
    assert len(modes) == 2
    for colours in modes:
        for ink in ("ink", "soft", "accent", "bad"):
            for ground in ("page", "panel", "shade"):
                assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)


def test_everything_from_files_is_escaped(tmp_path):
    evil = "<script>alert(1)</script>\"'&"
    (tmp_path / "config.yaml").write_text(f"name: {evil}\n")
    (tmp_path / "metrics.csv").write_text(f'step,"{evil.replace(chr(34), chr(34) * 2)}"\n0,1.5\n')
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "t.csv").write_text("sample,predicted,label,picture\n<b>,<i>,<u>,../../../etc/passwd\n")
    table = {"name": "test/most_uncertain", "file": "t.csv", "caption": evil}
    content = {"metrics": {evil: 1.0}, "tables": [table], "counts": {evil: 3}, "created": evil, "model": {"head": evil}}
    (tmp_path / "dashboard.json").write_text(json.dumps(content))
    text = render(read_run(tmp_path))
    assert not Page(text).all("script")
    assert "&lt;script&gt;" in text
    assert not {"b", "i", "u"} & {
        tag for tag, _ in Page(text.split("Most uncertain samples</h2>")[1].split("</section>")[0]).tags
    }


def test_a_run_that_was_only_fitted_has_a_page_too(run, tmp_path):
    shutil.copy(run / "metrics.csv", tmp_path)
    rows = (run / "metrics.csv").read_text().splitlines()
    (tmp_path / "metrics.csv").write_text("\n".join(rows[:-1]) + "\n")  # without the row of the test
    text = write_report(tmp_path, tmp_path / "deep" / "page.html").read_text()
    assert "not tested" in text
    assert "Training</h2>" in text


def test_folders_that_are_no_runs(run, tmp_path, capsys):
    with pytest.raises(FileNotFoundError, match="found none at"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="run `brainet fit`"):
        read_run(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"did you mean .*version_0\?"):
        read_run(run.parent)
    (tmp_path / "dashboard.json").write_text("{oops")
    with pytest.raises(ValueError, match="expected JSON"):
        read_run(tmp_path)
    with pytest.raises(IsADirectoryError, match="--out FILE"):
        write_report(run, tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["report", str(tmp_path / "nowhere")])
    assert end.value.code == 2
    assert "expected the folder of a run" in capsys.readouterr().err


# Puts the pipes where the browser looks for them, first out of the way of each other, and becomes the browser.
TRAMPOLINE = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """A headless chromium over its debugging pipe: JSON messages that end in a zero byte, on descriptors 3 and 4."""

    def __init__(self, profile):
        flags = (
            "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
            f"--disable-component-update --disable-sync --user-data-dir={profile} --remote-debugging-pipe about:blank"
        )
        to_read, self.write = os.pipe()
        self.read, to_write = os.pipe()
        command = [sys.executable, "-c", TRAMPOLINE, str(to_read), str(to_write), BROWSER, *flags.split()]
        self.process = subprocess.Popen(command, pass_fds=(to_read, to_write), stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(to_write)
        self.number, self.rest, self.events, self.session = 0, b"", [], None
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def message(self):
        while b"\0" not in self.rest:
            part = os.read(self.read, 1 << 20)
            assert part, "the browser ended"
            self.rest += part
        text, self.rest = self.rest.split(b"\0", 1)
        return json.loads(text)

    def call(self, method, **params):
        self.number += 1
        sent = {"id": self.number, "method": method, "params": params}
        os.write(self.write, json.dumps(sent | ({"sessionId": self.session} if self.session else {})).encode() + b"\0")
        while True:
            message = self.message()
            if message.get("id") == self.number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def show(self, path, width, dark=False):
        """Load a page at a width; the URLs it asked for, and what the browser complained about."""
        self.events = []
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=width < 500
        )
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self.message())
        urls = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return urls, [e["params"]["entry"]["text"] for e in self.events if e["method"] == "Log.entryAdded"]

    def ask(self, expression):
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"]["value"]

    def screenshot(self, path):
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        Path(path).write_bytes(base64.b64decode(data))

    def close(self):
        self.process.terminate()
        self.process.wait(timeout=20)
        os.close(self.read)
        os.close(self.write)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if BROWSER is None:
        pytest.skip("no browser found: install chromium to see the report in one")
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_real_browser(run, browser, tmp_path, width, dark):
    page = write_report(run, tmp_path / "page.html")
    urls, complaints = browser.show(page, width, dark)
    assert [url for url in urls if not url.startswith("data:")] == [page.resolve().as_uri()]
    assert not complaints
    assert browser.ask("innerWidth") == width
    page_width = browser.ask("document.documentElement.clientWidth")  # a desktop's scroll bar takes some
    assert browser.ask("document.documentElement.scrollWidth") == page_width  # nothing to scroll sideways
    every = "Promise.all([...document.images].map(i => i.decode().then(() => i.naturalWidth > 0, () => false)))"
    decoded = browser.ask(every)
    assert len(decoded) == len(FIGURES) + 5
    assert all(decoded)
    figures = browser.ask(
        "[...document.querySelectorAll('figure:not(.wide) img')].map(i => i.getBoundingClientRect().width)"
    )
    assert all(0.75 * min(width, 500) < w <= width for w in figures)
    text = "[...document.querySelectorAll('p,td,th,small,a,pre')]"
    small = browser.ask(f"Math.min(...{text}.map(e => parseFloat(getComputedStyle(e).fontSize)))")
    assert small >= 12
    ground = browser.ask("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 150) == dark
    assert ("invert" in browser.ask("getComputedStyle(document.querySelector('figure img')).filter")) == dark
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 50_000
