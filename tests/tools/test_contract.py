import pytest

from tools.contract import MEANINGS, METHOD, SERVICE, comments_of, contract
from tools.openapi_document import demand_complete


def test_every_service_and_every_method_is_described():
    file = contract()
    comments = comments_of(file)
    for number, service in enumerate(file.service):
        assert comments[SERVICE, number]
        assert all(comments[SERVICE, number, METHOD, index] for index in range(len(service.method)))


def test_what_is_said_here_is_said_of_what_the_contract_has():
    file = contract()
    names = {service.name for service in file.service}
    names |= {method.name for service in file.service for method in service.method}
    assert names >= MEANINGS.keys()


def test_no_comment_points_to_what_readers_do_not_have():
    comments = comments_of(contract())
    assert not [comment for comment in comments.values() if "DESIGN" in comment]


def test_comments_of_the_contract_come_first():
    [service] = [
        one for one in comments_of(contract()).values() if one.startswith("Answered under")
    ]
    assert service.endswith("The same holds for the other services.")


def test_what_is_not_said_of_a_new_method_is_named_with_its_place():
    file = contract()
    file.service[0].method.add(name="Forget", input_type="X", output_type="Y")
    file.service.add(name="RateLimiterNew")
    with pytest.raises(SystemExit) as ended:
        demand_complete(file, comments_of(file))
    assert str(ended.value).splitlines()[1:] == [
        "Forget: its role, in src/ratelimitd/services/methods.py",
        "Forget: its meaning, in MEANINGS of tools/contract.py",
        "Forget: an example, in EXAMPLES of tools/openapi_document.py; its errors, in ERRORS_OF there",
        "RateLimiterNew: its meaning, in MEANINGS of tools/contract.py",
    ]
