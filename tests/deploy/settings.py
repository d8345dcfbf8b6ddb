"""Settings as a deployment gives them, read as a node would."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ratelimitd.settings.table import Settings


def settings_with(
    variables: Mapping[str, str], *, secrets: str = "/run/secrets", instead: Path | None = None
) -> Settings:
    """The settings of a node in a container, whose secrets are files in ``instead`` here.

    Raises:
        SettingsError: a variable is no setting, or has a wrong value.
    """
    environ = {
        name: value.replace(secrets, str(instead)) if instead is not None else value
        for name, value in variables.items()
    }
    return Settings.load(environ, {})
