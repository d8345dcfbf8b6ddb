from ratelimitd.cli.doctor.finding import Level, ok, problem, warning


def test_a_finding_that_needs_no_remedy_has_none():
    assert ok("a", "b") == ("a", Level.OK, "b", "")
    assert warning("a", "b", "c") == ("a", Level.WARNING, "b", "c")
    assert problem("a", "b", "c") == ("a", Level.PROBLEM, "b", "c")
    assert f"{Level.PROBLEM}" == "problem"
