"""The fuzz's own promises: requests are a function of seed and number, and every field of every RPC is met."""

from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor

from tests.campaigns.fuzz import contract, wire
from tests.campaigns.fuzz.hostile import BROKEN
from tests.campaigns.fuzz.mutations import fill, mutate
from tests.campaigns.fuzz.targets.store_target import StoreTarget
from tools.kvasir_tiny.words import Dice


def test_a_request_is_made_again_by_its_seed_and_number(tmp_path: Path) -> None:
    first, second = (StoreTarget(tmp_path / name, seed=5) for name in ("a", "b"))
    for number in (0, 7, 400):
        assert first.requests().of(5, number) == second.requests().of(5, number)
    assert first.requests().of(5, 7) != first.requests().of(6, 7)


def test_every_rpc_of_both_services_has_statuses_that_its_comment_names() -> None:
    rpcs = [*contract.store_rpcs().values(), *contract.engine_rpcs().values()]
    assert len(rpcs) >= 34
    for rpc in rpcs:
        assert not rpc.statuses & {"INTERNAL", "UNKNOWN"}
    assert "ABORTED" in contract.store_rpcs()["CommitSnapshot"].statuses
    assert contract.engine_rpcs()["Warm"].statuses == contract.engine_rpcs()["Generate"].statuses


@pytest.mark.long(4)
def test_mutations_reach_every_field_of_every_request() -> None:
    dice = Dice("every field")
    for rpc in (*contract.store_rpcs().values(), *contract.engine_rpcs().values()):
        met: set[str] = set()
        for _ in range(40 * (1 + len(_fields(rpc.request_type.DESCRIPTOR)))):
            message = fill(rpc.request_type(), dice, {})
            before = rpc.request_type.FromString(message.SerializeToString())
            mutate(message, dice, {})
            met |= {
                field.name
                for field in message.DESCRIPTOR.fields
                if _only(message, field.name) != _only(before, field.name)
            }
        assert met == {field.name for field in rpc.request_type.DESCRIPTOR.fields}, rpc.name


def test_a_broken_text_is_no_utf8_and_keeps_its_length() -> None:
    data = wire.break_texts(f"x{BROKEN}y".encode(), Dice("broken"))
    assert len(data) == len(BROKEN) + 2
    assert data.decode("utf-8", "replace").encode() != data


def _fields(descriptor: Descriptor) -> list[str]:
    return [field.name for field in descriptor.fields]


def _only(message: object, name: str) -> str:
    return repr(getattr(message, name))
