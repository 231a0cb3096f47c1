"""Runs the short part of the fault matrix, suite by suite; prints its table."""

import pytest

from tests.faults.__main__ import SUITES, chosen, run_suite, suite_of
from tests.faults.matrix import Case, Tally, Verdict, closing_table

SUITE_TIMEOUT_S = 600
TALLIES: list[Tally] = []


@pytest.fixture(scope="module", autouse=True)
def table(request):
    yield
    report = request.config.pluginmanager.getplugin("terminalreporter")
    report.write_line("")
    for line in closing_table(TALLIES).splitlines():
        report.write_line(line)


@pytest.mark.timeout(SUITE_TIMEOUT_S)
@pytest.mark.parametrize("name", SUITES)
def test_suite_has_no_complaint(name, tmp_path):
    suite = suite_of(name)
    complaints = []

    def note(suite_name, case, verdict):
        complaints.extend(
            f"{suite_name}/{case.name}: {column}: {text}"
            for column, text in verdict.complaints.items()
        )

    tally = run_suite(suite, chosen(suite, "ci", []), tmp_path, note)

    TALLIES.append(tally)
    if tally.not_run:
        pytest.skip(tally.not_run)
    assert tally.n_cases
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("name", SUITES)
def test_names_of_cases_are_unique_and_stable(name):
    suite = suite_of(name)

    names = [case.name for case in suite.cases()]

    assert names
    assert len(set(names)) == len(names)
    assert names == [case.name for case in suite.cases()]


def test_table_counts_complaints_by_column():
    tally = Tally("errors")
    tally.add(Case(name="a"), Verdict())
    tally.add(Case(name="b"), Verdict(lost="gone", hung="rank 2"))

    table = closing_table([tally, Tally("network", not_run="no FUSE")])

    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines()]
    assert rows[0][:6] == ["suite", "cases", "lost", "silent", "hung", "wrong error"]
    assert rows[2][:7] == ["errors", "2", "1", "0", "1", "0", "0"]
    assert table.splitlines()[-1] == "not run: network: no FUSE"


def test_case_left_out_by_a_suite_is_a_complaint(tmp_path):
    class Forgetful:
        name = "forgetful"

        def why_not(self):
            return None

        def cases(self):
            return [Case(name="a")]

        def run(self, cases, folder):
            return iter(())

    said = []

    tally = run_suite(
        Forgetful(), Forgetful().cases(), tmp_path, lambda *told: said.append(told)
    )

    assert tally.count("hung") == 1
    assert len(said) == 1
