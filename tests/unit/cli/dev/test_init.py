"""The group of commands that try things out."""


def test_the_group_shows_what_is_in_it(run):
    ended = run("dev", "--help")
    assert ended.status == 0
    assert "cluster  " in ended.out
