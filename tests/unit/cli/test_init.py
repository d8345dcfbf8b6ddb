"""The way in: gRPC's own voice is off before it can speak."""

import os
import subprocess
import sys

from ratelimitd.cli import main


def test_the_status_of_the_command_is_returned(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("ratelimitd ")


def test_grpc_writes_no_lines_of_its_own_unless_somebody_asks_for_them(capsys, monkeypatch):
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    main(["--version"])
    assert os.environ["GRPC_VERBOSITY"] == "NONE"
    monkeypatch.setenv("GRPC_VERBOSITY", "DEBUG")
    main(["--version"])
    assert os.environ["GRPC_VERBOSITY"] == "DEBUG"


def test_what_grpc_would_complain_about_is_one_line_of_the_command(tmp_path):
    (tmp_path / "ca.pem").write_text("-----BEGIN nothing")
    code = "import sys; from ratelimitd.cli import main; sys.exit(main(sys.argv[1:]))"
    command = ["health", "--target", "127.0.0.1:1", "--ca", str(tmp_path / "ca.pem")]
    environ = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    ended = subprocess.run(
        [sys.executable, "-c", code, *command],
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
