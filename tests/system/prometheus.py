"""A real Prometheus that scrapes nodes and judges our alert rules, in short intervals."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import httpx
import yaml

from tests.deploy.monitoring import ALERTS
from tests.servers import free_port, until

SCRAPE_S: Final = 0.5
"""How often it scrapes and judges here, where it is 15 s in earnest."""

SCALE: Final = 15 / SCRAPE_S

_UNPACKED: Final = Path(sys.prefix) / "debian/usr/bin"
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600}
_DURATION: Final = re.compile(r"\b(\d+)([smh])\b")


def program(name: str) -> str:
    """The path of ``prometheus`` or ``promtool``, as ``tools/system_packages.sh`` unpacked it."""
    found = shutil.which(name, path=str(_UNPACKED))
    assert found, f"no {name}: run the tests by `make test-system`, which unpacks it"
    return found


def quick_alerts() -> str:
    """The alert rules with every duration as much shorter as the intervals are."""
    rules = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule["expr"] = _DURATION.sub(_shortened, rule["expr"])
            if "for" in rule:
                rule["for"] = _DURATION.sub(_shortened, rule["for"])
    return yaml.safe_dump(rules)


def _shortened(found: re.Match[str]) -> str:
    milliseconds = int(found[1]) * _UNITS_S[found[2]] * 1000 / SCALE
    return f"{milliseconds:.0f}ms"


class Prometheus:
    """One server, from ``with`` to its end; scrapes ``targets`` as the job ``ratelimitd``."""

    def __init__(self, directory: Path, targets: Sequence[str]) -> None:
        self.directory = directory
        self.url = f"http://127.0.0.1:{free_port()}"
        self._targets = targets
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True)
        (self.directory / "alerts.yml").write_text(quick_alerts())
        config = {
            "global": {
                "scrape_interval": f"{SCRAPE_S * 1000:.0f}ms",
                "scrape_timeout": f"{SCRAPE_S * 1000:.0f}ms",
                "evaluation_interval": f"{SCRAPE_S * 1000:.0f}ms",
            },
            "rule_files": ["alerts.yml"],
            "scrape_configs": [
                {"job_name": "ratelimitd", "static_configs": [{"targets": [*self._targets]}]}
            ],
        }
        (self.directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        with (self.directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program("prometheus"),
                    f"--config.file={self.directory / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self.directory / 'data'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                ],
                stdout=log,
                stderr=log,
            )
        try:
            until(self._ready, "Prometheus is ready")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its API."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", json.dumps(answer)
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression has now."""
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def firing(self) -> set[str]:
        """The alerts that fire."""
        alerts = self.ask("alerts")["alerts"]
        return {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}

    def _ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.directory / "log").read_text()
        try:
            return httpx.get(f"{self.url}/-/ready").is_success
        except httpx.TransportError:
            return False
