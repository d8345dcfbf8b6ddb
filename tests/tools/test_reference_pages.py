from tools import reference_pages


def test_every_part_of_the_contract_is_on_the_page_with_its_comment():
    file = reference_pages.contract()
    page = reference_pages.rpc_page(file)
    for service in file.service:
        assert f"\n## {service.name}\n" in page
        assert all(f"| `{method.name}` | " in page for method in service.method)
    for message in file.message_type:
        assert f"\n### {message.name}\n" in page
        assert all(f"| `{field.name}` | {field.number} | " in page for field in message.field)
    for enum in file.enum_type:
        assert all(f"| `{value.name}` | {value.number} | " in page for value in enum.value)
    assert "| `limit` | 6 | int32 | of the rule that decided; 0 when none did |" in page
    assert "| `labels` | 5 | map of string to string |" in page
    assert "| `enabled` | 7 | optional bool |" in page
    assert "| `requests` | 1 | repeated [RateLimitRequest](#ratelimitrequest) |" in page


def test_a_page_that_is_not_what_would_be_written_fails_the_check(tmp_path, monkeypatch, capsys):
    page = tmp_path / "rpc.md"
    monkeypatch.setattr(reference_pages, "PAGE", page)
    monkeypatch.setattr("sys.argv", ["reference_pages.py", "--write"])
    assert reference_pages.main() == 0
    monkeypatch.setattr("sys.argv", ["reference_pages.py", "--check"])
    assert reference_pages.main() == 0
    page.write_text(page.read_text(encoding="utf-8").replace("int32", "int64"), encoding="utf-8")
    assert reference_pages.main() == 1
    assert "docs/reference/rpc.md: out of date" in capsys.readouterr().out
