"""The form of a rule: the texts that somebody typed, and the rule they make. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Self

from ratelimitd.errors import RuleInvalidError
from ratelimitd.model import Algorithm, IdentifierType, Rule
from ratelimitd.rules.store import RuleDraft
from ratelimitd.rules.validation import validated

DEFAULT_WINDOW_S: Final = "60"

_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,20}")


class RuleForm(NamedTuple):
    """A rule as it was typed."""

    endpoint: str = ""
    identifier_type: str = IdentifierType.USER
    limit: str = ""
    window_seconds: str = DEFAULT_WINDOW_S
    algorithm: str = Algorithm.TOKEN_BUCKET
    enabled: bool = True

    @classmethod
    def of_fields(cls, fields: Mapping[str, str]) -> Self:
        """From the fields of a form; a box that is not ticked is not among them."""
        return cls(
            endpoint=fields.get("endpoint", ""),
            identifier_type=fields.get("identifier_type", ""),
            limit=fields.get("limit", "").strip(),
            window_seconds=fields.get("window_seconds", "").strip(),
            algorithm=fields.get("algorithm", ""),
            enabled="enabled" in fields,
        )

    @classmethod
    def of_rule(cls, rule: Rule) -> Self:
        """With the values of a rule."""
        return cls(
            endpoint=rule.endpoint,
            identifier_type=rule.identifier_type,
            limit=str(rule.limit),
            window_seconds=str(rule.window_seconds),
            algorithm=rule.algorithm,
            enabled=rule.enabled,
        )

    def checked(self) -> Rule:
        """The rule, without an id.

        Raises:
            RuleInvalidError: names every field that is wrong, by its path in the contract.
        """
        draft = RuleDraft(
            endpoint=self.endpoint,
            identifier_type=self.identifier_type,
            limit=whole_number(self.limit),
            window_seconds=whole_number(self.window_seconds),
            algorithm=self.algorithm,
            enabled=self.enabled,
        )
        return validated(draft, rule_id="", revision=0)

    def errors(self) -> dict[str, str]:
        """What is wrong with which field; empty when nothing is."""
        try:
            self.checked()
        except RuleInvalidError as error:
            return {
                violation.field.rpartition(".")[2]: violation.description
                for violation in error.violations
            }
        return {}


def whole_number(text: str) -> Any:
    """The number; any other text as it is, for the validation to refuse."""
    return int(text) if _WHOLE.fullmatch(text) else text
