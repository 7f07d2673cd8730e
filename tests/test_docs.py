"""What the documents claim and a program can check."""

import re

from benchmarks.figures import FIGURES
from benchmarks.rows import rows
from smp.config import _SPELLING, ALIASES, NO_EFFECT, Config
from tests.harness import ROOT


def test_readme_names_every_configuration_key() -> None:
    """A key that is missing in the table does not exist for users."""
    named = set(re.findall(r"`(\w+)`", (ROOT / "README.md").read_text()))
    keys = {_SPELLING.get(name, name) for name in Config.model_fields} | set(ALIASES)
    assert keys - named == set()


def test_readme_says_which_keys_have_no_effect() -> None:
    """The table's rows and what `smp.init` warns of must agree."""
    rows = [
        line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("|") and "no effect" in line
    ]
    named = {key for row in rows for key in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == set(NO_EFFECT)


def test_contributor_guide_names_only_files_that_exist() -> None:
    """A tour that points to nothing is worse than none."""
    for document in ("README.md", "CONTRIBUTING.md"):
        for path in re.findall(r"`((?:smp|tests|examples|smdistributed)/[\w./]+)`", (ROOT / document).read_text()):
            assert (ROOT / path).exists(), f"{document}: {path}"


def test_readme_lists_the_rows_of_the_benchmarks() -> None:
    """A row that nobody knows of is not run; one that is only written down cannot be."""
    section = (ROOT / "README.md").read_text().split("## Speed and memory")[1].split("\n## ")[0]
    named = {
        name
        for line in section.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`([\w-]+)`", line.split("|")[1])
    }
    assert named == {row.name for row in rows({})} | set(FIGURES)
