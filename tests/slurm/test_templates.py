"""What can be said of the templates without running them."""

import re
import shutil
import subprocess

import pytest

from tests.slurm.templates import REPOSITORY, SHARED, TEMPLATES, parts_of, template

README = REPOSITORY / "slurm" / "README.md"


def test_templates_are_all_there():
    found = sorted(path.stem for path in (REPOSITORY / "slurm").glob("*.sbatch"))

    assert found == sorted(TEMPLATES)


def test_templates_end_alike():
    endings = {template(name).split(SHARED)[1] for name in TEMPLATES}

    assert len(endings) == 1


@pytest.mark.parametrize("name", TEMPLATES)
def test_readme_explains_each_line_to_be_edited(name):
    readme = README.read_text()
    _, block, _ = parts_of(template(name))

    options = re.findall(r"^#SBATCH (--[a-z-]+)", block, re.M)
    variables = re.findall(r"^(\w+)(?==|\(\))", block, re.M)

    assert options and variables
    unexplained = [word for word in options + variables if f"`{word}" not in readme]
    assert unexplained == []


@pytest.mark.parametrize("name", TEMPLATES)
def test_readme_explains_each_function(name):
    readme = README.read_text()

    functions = re.findall(r"^(\w+)\(\) \{", template(name), re.M)

    assert [word for word in functions if f"`{word}" not in readme] == []


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="no shellcheck")
@pytest.mark.parametrize("name", TEMPLATES)
def test_shellcheck_finds_nothing(name):
    checked = subprocess.run(
        ["shellcheck", str(REPOSITORY / "slurm" / f"{name}.sbatch")],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert checked.returncode == 0, checked.stdout
