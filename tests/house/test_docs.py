"""The pages name files, tests, flags and targets that exist, and stay short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.house.sources import ROOT, tracked

PAGES = tuple(path for path in tracked() if path.suffix == ".md")
MOST_WORDS = 20_150 + 620 + 550 + 370 + 60 + 100
"""Of all pages together; bars and dashes of tables are no words."""

FOREIGN_FLAGS = frozenset({"index-url"})
"""Of other programs."""

CODE = re.compile(r"`([^`\n]+)`")
FOLDERS = ("benchmarks", "deploy", "docs", "kvrelay", "kvstore", "protos", "router", "tests")
COMMAND = re.compile(r"python -m ([\w.]+)")


def test_links_lead_somewhere() -> None:
    wrong = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = target.partition("#")
            if ":" in path:
                continue
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or (anchor and anchor not in _anchors(file)):
                wrong.append(f"{_show(page)}: {target}")
    assert not wrong, "\n".join(wrong)


def test_files_that_are_named_exist() -> None:
    wrong = [
        f"{_show(page)}: {name}"
        for page in PAGES
        for name in _quoted(page)
        if re.fullmatch(r"[\w./-]+", name)
        and name.split("/")[0] in FOLDERS
        and "/" in name
        and not (ROOT / name.rstrip("/")).exists()
        and not (page.parent / name).exists()
    ]
    assert not wrong, "\n".join(wrong)


def test_tests_that_are_named_exist() -> None:
    wrong = [
        f"{_show(page)}: {name}"
        for page in PAGES
        if page.name != "proof.md"  # written by `make prove`
        for name in _quoted(page)
        if re.fullmatch(r"test_\w+(\.py|\*)?", name) and not _is_test(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_and_targets_that_are_named_exist() -> None:
    wrong = []
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        wrong += [f"{_show(page)}: {name}" for name in COMMAND.findall(text) if not _module(name)]
        named = set(re.findall(r"`make ([a-z-]+)", text)) | set(
            re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)
        )
        wrong += [f"{_show(page)}: make {name}" for name in named - targets]
    assert not wrong, "\n".join(wrong)


def test_flags_that_are_named_exist() -> None:
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for path in tracked()
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] != "docs"
    )
    wrong = []
    for page in PAGES:
        for flag in set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)", page.read_text("utf-8"))):
            name = flag.replace("-", "_").removeprefix("no_")
            if flag in FOREIGN_FLAGS:
                continue
            if not re.search(rf"\b{name}\b|--{flag}\b", sources):
                wrong.append(f"{_show(page)}: --{flag}")
    assert not wrong, "\n".join(wrong)


def test_the_pages_are_short() -> None:
    words = {_show(page): _words(page.read_text(encoding="utf-8")) for page in PAGES}
    assert sum(words.values()) <= MOST_WORDS, words


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_has_one_title(page: Path) -> None:
    fence, titles = False, 0
    for line in page.read_text(encoding="utf-8").splitlines():
        fence ^= line.startswith("```")
        titles += not fence and line.startswith("# ")
    assert titles == 1


def _words(text: str) -> int:
    return sum(1 for word in text.split() if any(char.isalnum() for char in word))


def _quoted(page: Path) -> Iterator[str]:
    yield from CODE.findall(page.read_text(encoding="utf-8"))


@cache
def _anchors(page: Path) -> frozenset[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\s-]", "", head.lower()).replace(" ", "-") for head in heads)


@cache
def _test_names() -> frozenset[str]:
    found = set[str]()
    for path in (ROOT / "tests").rglob("test_*.py"):
        found.add(path.name)
        found |= set(re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8")))
    return frozenset(found)


def _is_test(name: str) -> bool:
    if name.endswith("*"):
        return any(one.startswith(name[:-1]) for one in _test_names())
    return name in _test_names()


def _module(name: str) -> bool:
    if name.split(".")[0] in ("pytest", "venv", "pip"):
        return True
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


def _show(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()
