"""The exchange under a code, step by step: who knows the code gets through, and nobody who changes what is said."""

import random
from dataclasses import replace

import pytest
from kvasir.errors import FailedPrecondition, InvalidArgument, KvasirError, PermissionDenied

from cachestore_svc.pairing.codes import check_peer_address, line_of, new_code, read_code, read_code_or_line
from cachestore_svc.pairing.exchange import MAX_WRONG_GUESSES, Card, Hosting, Invitation, Joining
from cachestore_svc.pairing.identity import Certificate, new_identity

CODE = "ABCD-EFGH"
# Keys are slow to make, and no test changes one.
HOST, JOINER, STRANGER = new_identity(), new_identity(), new_identity()


RANDOM = random.Random(1).randbytes


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def card_of(identity: object, name: str) -> Card:
    return Card(name, identity.certificate, "127.0.0.1:1")  # type: ignore[attr-defined]


HOST_CARD, JOINER_CARD = card_of(HOST, "host"), card_of(JOINER, "joiner")


def begun(code: str = CODE, invitation: Invitation | None = None) -> tuple[Hosting, Joining]:
    """Both sides after their shares."""
    hosting = Hosting(invitation or Invitation(CODE, Clock()), HOST, RANDOM)
    joining = Joining(code, JOINER, RANDOM)
    hosting.take_share(joining.share)
    joining.take_share(hosting.share)
    return hosting, joining


def test_both_get_the_others_card_and_each_proves_its_key() -> None:
    hosting, joining = begun()
    assert hosting.take_card(joining.card(JOINER_CARD)) == JOINER_CARD
    assert joining.take_card(hosting.card(HOST_CARD)) == HOST_CARD
    hosting.take_signature(joining.signature())
    joining.take_signature(hosting.signature())


def test_five_wrong_guesses_end_the_code_for_the_right_one_too() -> None:
    invitation = Invitation(CODE, Clock())
    waiting = Hosting(invitation, HOST, RANDOM)
    for left in reversed(range(MAX_WRONG_GUESSES)):
        hosting, joining = begun("ABCD-EFG" + str(left), invitation)
        with pytest.raises(PermissionDenied, match=f"{left} guesses") as told:
            hosting.take_card(joining.card(JOINER_CARD))
        assert told.value.metadata == {"guesses_left": str(left)}
    assert invitation.is_over
    with pytest.raises(FailedPrecondition):
        Hosting(invitation, HOST, RANDOM)
    # A run that began before the last guess has no better chance.
    late = Joining(CODE, JOINER, RANDOM)
    waiting.take_share(late.share)
    late.take_share(waiting.share)
    with pytest.raises(FailedPrecondition):
        waiting.take_card(late.card(JOINER_CARD))


def test_a_code_is_good_once() -> None:
    invitation = Invitation(CODE, Clock())
    hosting, joining = begun(invitation=invitation)
    other_hosting, other_joining = begun(invitation=invitation)
    hosting.take_card(joining.card(JOINER_CARD))
    for attempt in (
        lambda: Hosting(invitation, HOST, RANDOM),
        lambda: other_hosting.take_card(other_joining.card(JOINER_CARD)),
    ):
        with pytest.raises(FailedPrecondition) as told:
            attempt()
        assert told.value.reason == "PAIRING_OVER"


def test_an_old_code_is_none() -> None:
    clock = Clock()
    invitation = Invitation(CODE, clock, lifetime_s=600)
    hosting, joining = begun(invitation=invitation)
    clock.now_s = 600.0
    with pytest.raises(FailedPrecondition):
        hosting.take_card(joining.card(JOINER_CARD))
    with pytest.raises(FailedPrecondition):
        Hosting(invitation, HOST, RANDOM)


def test_what_one_run_said_means_nothing_in_another() -> None:
    hosting, joining = begun()
    recorded = joining.card(JOINER_CARD)
    assert hosting.take_card(recorded) == JOINER_CARD
    replayed = Hosting(Invitation(CODE, Clock()), HOST, RANDOM)
    replayed.take_share(joining.share)
    with pytest.raises(PermissionDenied):
        replayed.take_card(recorded)


def test_a_machine_in_the_middle_that_guesses_gets_neither_card_and_both_refuse() -> None:
    hosting, joining = Hosting(Invitation(CODE, Clock()), HOST, RANDOM), Joining(CODE, JOINER, RANDOM)
    towards_host = Joining("ZZZZ-ZZZZ", STRANGER, RANDOM)
    towards_joiner = Hosting(Invitation("ZZZZ-ZZZZ", Clock()), STRANGER, RANDOM)
    hosting.take_share(towards_host.share)
    towards_host.take_share(hosting.share)
    joining.take_share(towards_joiner.share)
    towards_joiner.take_share(joining.share)
    with pytest.raises(PermissionDenied):
        towards_joiner.take_card(joining.card(JOINER_CARD))
    with pytest.raises(PermissionDenied):
        hosting.take_card(towards_host.card(card_of(STRANGER, "joiner")))
    with pytest.raises(PermissionDenied):
        joining.take_card(b"\0" * 400)


@pytest.mark.parametrize(
    "step", ["joiner's share", "host's share", "joiner's card", "host's card", "joiner's signature", "host's signature"]
)
def test_a_changed_bit_of_any_message_ends_the_exchange(step: str) -> None:
    def sent(name: str, message: bytes) -> bytes:
        return message[:-1] + bytes((message[-1] ^ 1,)) if name == step else message

    def exchange() -> None:
        hosting, joining = Hosting(Invitation(CODE, Clock()), HOST, RANDOM), Joining(CODE, JOINER, RANDOM)
        hosting.take_share(sent("joiner's share", joining.share))
        joining.take_share(sent("host's share", hosting.share))
        hosting.take_card(sent("joiner's card", joining.card(JOINER_CARD)))
        joining.take_card(sent("host's card", hosting.card(HOST_CARD)))
        hosting.take_signature(sent("joiner's signature", joining.signature()))
        joining.take_signature(sent("host's signature", hosting.signature()))

    with pytest.raises((PermissionDenied, InvalidArgument)):
        exchange()


def test_who_shows_a_certificate_without_its_key_is_not_pinned() -> None:
    hosting, joining = begun()
    hosting.take_card(joining.card(card_of(STRANGER, "joiner")))
    joining.take_card(hosting.card(HOST_CARD))
    with pytest.raises(PermissionDenied, match="key of its certificate"):
        hosting.take_signature(joining.signature())


def test_our_own_share_and_bytes_that_are_none_are_refused() -> None:
    for share in (b"", b"A", b"B" + bytes(32), b"B" + b"\xff" * 32, b"x" * 5000):
        with pytest.raises(InvalidArgument):
            Hosting(Invitation(CODE, Clock()), HOST, RANDOM).take_share(share)
    reflected = Hosting(Invitation(CODE, Clock()), HOST, RANDOM)
    with pytest.raises(InvalidArgument):
        reflected.take_share(reflected.share)


@pytest.mark.parametrize(
    ("card", "field"),
    [
        (replace(JOINER_CARD, name="../peers"), "card.name"),
        (replace(JOINER_CARD, name=""), "card.name"),
        (replace(JOINER_CARD, address="unix:/tmp/x"), "card.address"),
        (replace(JOINER_CARD, address="0.0.0.0:1"), "card.address"),
        (replace(JOINER_CARD, address="h:0"), "card.address"),
        (replace(JOINER_CARD, certificate=Certificate(b"x")), "card.certificate"),
        (replace(JOINER_CARD, certificate=Certificate(bytes(5000))), "card.certificate"),
    ],
)
def test_a_card_that_says_what_no_store_would_is_refused_by_its_field(card: Card, field: str) -> None:
    hosting, joining = begun()
    with pytest.raises(InvalidArgument) as told:
        hosting.take_card(joining.card(card))
    assert told.value.field == field


def test_codes_are_read_as_people_type_them() -> None:
    made = {new_code(RANDOM) for _ in range(50)}
    assert len(made) == 50
    assert all(read_code(code) == code for code in made)
    assert read_code(" abcd efgh ") == "ABCD-EFGH"
    assert read_code("o1Li-0000") == "0111-0000"
    for text in ("", "ABCD-999", "ABCD-EFGHJ", "ABCD-EFGU", "ABCD-EFG\u00c5", "٠٠٠٠-٠٠٠٠"):
        with pytest.raises(InvalidArgument) as told:
            read_code(text)
        assert not text or text not in told.value.message


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_an_address_of_all_interfaces_is_refused_by_its_host_alone(host: str) -> None:
    """The port may be one that nobody typed: `kvasir pair --listen` takes a host."""
    with pytest.raises(InvalidArgument, match="expected one host's address") as refused:
        check_peer_address(f"{host}:1", "listen")
    assert (refused.value.field, ":1" in refused.value.message) == ("listen", False)


def test_a_line_has_code_and_address() -> None:
    assert read_code_or_line(line_of(CODE, "studio.local:8643") + "\n") == (CODE, "studio.local:8643")
    assert read_code_or_line("abcdefgh") == (CODE, "")
    for line in (
        "kvasir-pair:ABCD-EFGH",
        "kvasir-pair:ABCD-EFGH@unix:/x",
        "kvasir-pair:@h:1",
        "kvasir-pair:ABCD-EFGH@h",
    ):
        with pytest.raises(KvasirError):
            read_code_or_line(line)
