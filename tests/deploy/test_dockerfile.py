"""The Dockerfile, as far as it can be judged without building it; tests/system builds it."""

import json
from pathlib import Path

from ratelimitd.settings.parsing import Address
from tests.deploy.dockerfile import sent_to_the_builder, stages
from tests.deploy.monitoring import ROOT
from tests.deploy.settings import settings_with

BUILD, IMAGE = stages()


def texts_of(stage, name):
    return [instruction.text for instruction in stage if instruction.name == name]


def test_everything_that_is_copied_is_there_and_reaches_the_builder():
    for instruction in BUILD:
        if instruction.name == "COPY":
            *sources, _ = instruction.words
            for source in sources:
                assert (ROOT / source).exists(), source
                assert sent_to_the_builder(Path(source)), source


def test_nothing_else_reaches_the_builder():
    for private in (".git", ".venv", "ratelimitd.db", "deploy/compose/secrets/admin_token"):
        assert not sent_to_the_builder(Path(private)), private
    assert not sent_to_the_builder(Path("src/ratelimitd/__pycache__"))


def test_every_package_is_verified_by_its_hash():
    installs = [
        command
        for text in texts_of(BUILD, "RUN")
        for command in text.split(" && ")
        if "pip" in command and " install " in command
    ]
    assert len(installs) == 3
    for command in installs:
        assert "--require-hashes" in command or "--no-deps wheels/" in command


def test_the_node_is_not_root_and_its_files_are_its_own():
    [user] = texts_of(IMAGE, "USER")
    assert user == "10001:10001"
    [volume] = texts_of(IMAGE, "VOLUME")
    assert texts_of(IMAGE, "WORKDIR") == [volume]
    [made] = texts_of(IMAGE, "RUN")
    assert f"--owner=10001 --group=10001 --mode=0700 {volume}" in made


def test_what_the_image_sets_are_settings():
    [text] = texts_of(IMAGE, "ENV")
    variables = dict(word.split("=", 1) for word in text.split())
    del variables["PATH"]
    settings = settings_with(variables)
    assert settings.listen == Address("0.0.0.0", 9090)  # noqa: S104 -- a container's own
    assert settings.http_listen == Address("0.0.0.0", 8080)  # noqa: S104
    assert texts_of(IMAGE, "EXPOSE") == [f"{settings.listen.port} {settings.http_listen.port}"]


def test_the_node_is_the_first_process_and_hears_of_its_end():
    [command], [arguments] = texts_of(IMAGE, "ENTRYPOINT"), texts_of(IMAGE, "CMD")
    assert [*json.loads(command), *json.loads(arguments)] == ["ratelimitd", "serve"]
    assert texts_of(IMAGE, "STOPSIGNAL") == ["SIGTERM"]


def test_a_degraded_node_stays_in_service():
    [check] = texts_of(IMAGE, "HEALTHCHECK")
    command = json.loads(check.split(" CMD ", 1)[1])
    assert command[:3] == ["ratelimitd", "health", "--ready"]
