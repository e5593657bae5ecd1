"""README and docs do what they say: commands, examples, links, options, figures."""

from __future__ import annotations

import json
import os
import re
import runpy
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from test_structure import LEVELS, NO_TORCH, PACKAGE

from nano_oasis import chat
from nano_oasis.serve import build_parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
TOUR = ROOT / "docs/01-tour.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/*.md"))]
# Threads that sleep while they wait: twice as fast where other processes want the cores too.
ENV = {**os.environ, "OMP_WAIT_POLICY": "passive"}
FIGURE = re.compile(r"\$ \.venv/bin/python (benchmarks/(?:counts|default_model)\.py) (\w+)\n(.*)", re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    """Contents of the fenced blocks whose opening line is ```language."""
    found = re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [body for info, body in found if info.strip() == language]


def python_of(command: str) -> str:
    """A documented command line with this interpreter in place of the venv's (in CI they are the same)."""
    return re.sub(r"(\$\(BIN\)|\.venv/bin)/python\b", shlex.quote(sys.executable), command)


def run_python(code: str, cwd: Path) -> str:
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=cwd, env=ENV, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- the commands of README ----------------------------------------------------------------------------


def test_readme_python_example(tmp_path):
    (example,) = blocks(ROOT / "README.md", "python")
    lines = [line for line in run_python(example, tmp_path).splitlines() if line]
    assert len(lines) == 2 and "Paris" in lines[0] and "4, 5, 6" in lines[1]


@pytest.fixture(scope="module")
def url():
    """A server started as `make serve ARGS="--port 0"` starts it; it must end with 0 on SIGTERM."""
    recipe = re.search(r"^serve:.*\n\t(.+)$", MAKEFILE, re.MULTILINE)[1]
    command = shlex.split(python_of(recipe).replace("$(ARGS)", "--port 0"))
    server = subprocess.Popen(command, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, text=True)
    try:
        assert select.select([server.stdout], [], [], 300)[0], "no start-up line"
        line = server.stdout.readline()
        assert re.search(r"smollm2, float32 on \w+, KV cache [\d,]+ tokens", line), line
        yield re.search(r"http://[\d.]+:\d+", line)[0]
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def test_readme_curl_example(url):
    (example,) = [b for b in blocks(ROOT / "README.md", "sh") if b.startswith("curl ")]
    command = example.replace("http://127.0.0.1:8000", url)
    assert command != example
    began = time.monotonic()
    reply = json.loads(run_curl(command))
    assert time.monotonic() - began < 120
    (choice,) = reply["choices"]
    assert reply["object"] == "chat.completion" and reply["model"] == "smollm2"
    assert "Paris" in choice["message"]["content"] and choice["finish_reason"] in ("stop", "length")
    assert reply["usage"]["completion_tokens"] <= 32


def run_curl(command: str) -> str:
    """The command as it stands; where there is no curl, the request its arguments describe."""
    words = shlex.split(command)
    if shutil.which(words[0]):
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout
    values = {flag: words[words.index(flag) + 1] for flag in ("-H", "-d")}
    name, value = values["-H"].split(": ", 1)
    request = urllib.request.Request(words[1], values["-d"].encode(), {name: value})
    with urllib.request.urlopen(request, timeout=300) as reply:
        return reply.read().decode()


def test_readme_make_commands_exist():
    commands = re.findall(r"^make [^#\n]+|(?<=`)make [^`]+(?=`)", README, re.MULTILINE)
    assert {"make serve", "make test"} <= {c.strip() for c in commands}
    for command in commands:
        words = shlex.split(command)[1:]
        (target,) = [w for w in words if "=" not in w]
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), command
        for word in words:
            name, _, value = word.partition("=")
            if name == "ARGS":
                build_parser().parse_args(shlex.split(value))
            elif name != target:
                assert re.search(rf"^{name} \?=", MAKEFILE, re.MULTILINE), command


def test_documented_options_exist():
    parsers = (build_parser(), chat.build_parser())
    known = {o for parser in parsers for action in parser._actions for o in action.option_strings}
    known |= {"--index-url", "--no-deps"}  # of pip
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/0[1-8]-*.md"))]:
        for code in re.findall(r"`([^`\n]+)`", page.read_text()):
            assert set(re.findall(r"--[a-z][a-z-]+", code)) <= known, f"{page.name}: {code}"


# --- the pages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("https://", "#")):
            assert (page.parent / target.partition("#")[0]).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_examples_compile(page):
    for code in blocks(page, "python") + blocks(page, "python run"):
        compile(code, page.name, "exec")


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python run")], ids=lambda p: p.name)
def test_runnable_examples_run(page, tmp_path):
    """All blocks marked ```python run of a page, one after the other in one process."""
    assert run_python("\n".join(blocks(page, "python run")), tmp_path).strip()


FIGURES = [(p, m) for p in PAGES for m in map(FIGURE.fullmatch, blocks(p, "console")) if m]


@pytest.mark.parametrize(
    ("page", "shown"), FIGURES, ids=lambda v: v[2] if isinstance(v, re.Match) else v.name
)
def test_counted_figures_are_current(page, shown, capsys):
    script, name, output = shown.groups()
    runpy.run_path(str(ROOT / script))["main"]([name])
    assert capsys.readouterr().out == output


def test_the_tour_leads_to_every_page():
    others = {p.name for p in ROOT.glob("docs/*.md")} - {TOUR.name}
    assert not [name for name in others if f"({name})" not in TOUR.read_text()]


def test_the_tour_has_the_level_table():
    rows = re.findall(r"^\| (\d) \| (.+?) \|", TOUR.read_text(), re.MULTILINE)
    shown = {m: (int(level), star) for level, names in rows for m, star in re.findall(r"`(.+?)`(\*?)", names)}
    built = [m for m in LEVELS if list(PACKAGE.glob(m.replace(".", "/") + "*"))]
    assert shown == {m: (LEVELS[m], "*" if m in NO_TORCH else "") for m in built}
