import sys
from datetime import UTC, datetime

import httpx
import jinja2
import pytest
from starlette.applications import Starlette

from ratelimitd.web.pages.rendering import (
    LASTING,
    NONE,
    CompiledTemplates,
    StaticFiles,
    duration,
    environment,
    faded,
    instant,
    look,
    milliseconds,
    number,
    percent,
    seconds,
    short,
    size,
)


@pytest.fixture
def files(tmp_path):
    (tmp_path / "a.css").write_text("a {}")
    (tmp_path / "b.js").write_text("b()")
    return StaticFiles(tmp_path)


async def get(files, path, **headers):
    transport = httpx.ASGITransport(app=Starlette(routes=[files.route()]))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.get(path, headers=headers)


async def test_file_is_cached_forever_under_an_address_with_its_hash(files):
    answer = await get(files, files.url("a.css"))
    assert (answer.text, answer.headers["cache-control"]) == ("a {}", LASTING)
    assert answer.headers["content-type"] == "text/css; charset=utf-8"


async def test_file_is_revalidated_under_any_other_address(files):
    answer = await get(files, "/static/b.js?v=old")
    assert (answer.text, answer.headers["cache-control"]) == ("b()", "no-cache")
    again = await get(files, "/static/b.js", **{"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


async def test_files_are_sent_from_memory_without_a_thread(files, monkeypatch):
    def no_thread(*_arguments, **_options):
        raise AssertionError

    monkeypatch.setattr("anyio.to_thread.run_sync", no_thread)
    assert (await get(files, "/static/a.css")).text == "a {}"


async def test_changed_content_has_another_address(files, tmp_path):
    (tmp_path / "a.css").write_text("b {}")
    assert StaticFiles(tmp_path).url("a.css") != files.url("a.css")


@pytest.mark.parametrize("path", ["/static/c.css", "/static/..%2frendering.py", "/static/"])
async def test_other_files_are_not_found(files, path):
    assert (await get(files, path)).status_code == 404


def test_template_output_is_escaped(tmp_path, files):
    (tmp_path / "t.html").write_text('<p title="{{ x }}">{{ x }}</p>')
    (tmp_path / "broken.html").write_text("{{ missing }}")
    templates = environment(files, tmp_path)
    text = templates.get_template("t.html").render(x="\"><script>alert('1')</script>")
    assert "<script>" not in text
    assert text.count("&#34;&gt;&lt;script&gt;") == 2
    with pytest.raises(jinja2.UndefinedError):
        templates.get_template("broken.html").render()


def test_unreadable_template_fails_at_once(tmp_path, files):
    (tmp_path / "t.html").write_text("{% if %}")
    with pytest.raises(jinja2.TemplateSyntaxError):
        environment(files, tmp_path)


def compiled_beside(module, files, templates):
    """Whether any template had to be compiled."""
    with pytest.MonkeyPatch.context() as patch:
        compiled = []
        compile_one = jinja2.Environment.compile
        patch.setattr(
            "jinja2.Environment.compile",
            lambda *arguments: compiled.append(1) or compile_one(*arguments),
        )
        text = environment(files, templates, CompiledTemplates(module)).get_template("t.html")
        assert text.render() == "a"
    return bool(compiled)


@pytest.fixture
def module(tmp_path_factory):
    code = tmp_path_factory.mktemp("code")
    (code / "__pycache__").mkdir()
    (code / "rendering.py").write_text("# options")
    return code / "rendering.py"


@pytest.fixture
def templates(tmp_path_factory):
    directory = tmp_path_factory.mktemp("templates")
    (directory / "t.html").write_text("{% if true %}a{% endif %}")
    return directory


def test_templates_are_compiled_once_for_each_version_of_the_module(
    module, files, templates, monkeypatch
):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert compiled_beside(module, files, templates)
    assert not compiled_beside(module, files, templates)
    module.write_text("# other options")
    assert compiled_beside(module, files, templates)


def test_a_damaged_compiled_template_is_compiled_again(module, files, templates, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    compiled_beside(module, files, templates)
    for path in (module.parent / "__pycache__").iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    assert compiled_beside(module, files, templates)
    assert not compiled_beside(module, files, templates)


def test_no_compiled_template_is_written_where_no_bytecode_is(
    module, files, templates, monkeypatch
):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert compiled_beside(module, files, templates)
    assert not [*(module.parent / "__pycache__").iterdir()]
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (module.parent / "__pycache__").rmdir()
    assert compiled_beside(module, files, templates)
    assert [*module.parent.iterdir()] == [module]


def test_numbers_have_a_thin_space_between_thousands():
    assert (number(999), number(1_234_567)) == ("999", "1\u202f234\u202f567")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1, "1 s"),
        (60, "1 min"),
        (5_400, "1 h 30 min"),
        (86_401, "1 d 1 s"),
        (2**31 - 1, "24\u202f855 d 3 h 14 min 7 s"),
    ],
)
def test_durations_use_the_largest_exact_units(seconds, text):
    assert duration(seconds) == text


def test_moments_are_in_utc():
    assert instant(1_700_006_400) == "2023-11-15 00:00:00 UTC"
    assert instant(datetime(2023, 11, 15, tzinfo=UTC)) == "2023-11-15 00:00:00 UTC"


def test_all_nodes_of_a_process_share_templates_and_files():
    static, templates = look()
    assert look() == (static, templates)
    assert "base.html" in templates.list_templates()


def plain(text):
    return text.replace("\u202f", " ")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0"),
        (0.004, "< 0.01"),
        (0.04, "0.04"),
        (0.5, "0.5"),
        (3.46, "3.5"),
        (9.96, "10"),
        (420.4, "420"),
        (12_345.6, "12 346"),
        (-2.0, "−2"),
    ],
)
def test_decimals_are_shown_for_small_values_only(value, expected):
    assert plain(short(value)) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(0.08, "< 1"), (0.99, "< 1"), (1.0, "1"), (3.46, "3.5")]
)
def test_faded_count_below_one_has_no_decimals(value, expected):
    assert plain(faded(value)) == expected


@pytest.mark.parametrize(
    ("value_ms", "expected"),
    [(None, NONE), (0.0354, "35 µs"), (1.52, "1.5 ms"), (250.0, "250 ms"), (4_530.0, "4.5 s")],
)
def test_latency_has_a_suitable_unit(value_ms, expected):
    assert plain(milliseconds(value_ms)) == expected


@pytest.mark.parametrize(
    ("value_s", "expected"),
    [(0, "0 s"), (0.25, "250 ms"), (-0.25, "−250 ms"), (12.3, "12 s"), (-3.0, "−3 s")],
)
def test_duration_has_a_suitable_unit(value_s, expected):
    assert plain(seconds(value_s)) == expected


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(None, NONE), (1.0, "100 %"), (0.9999, "99.9 %"), (0.97, "97 %"), (0.005, "0.5 %")],
)
def test_ratio_just_below_one_is_not_rounded_up(ratio, expected):
    assert plain(percent(ratio)) == expected


@pytest.mark.parametrize(
    ("octets", "expected"),
    [(0, "0 B"), (1_536, "1.5 KiB"), (120 * 2**20, "120 MiB"), (2**50, "1 024 TiB")],
)
def test_memory_has_a_suitable_unit(octets, expected):
    assert plain(size(octets)) == expected
