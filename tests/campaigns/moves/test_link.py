"""The measurement of moves over a paced link, in small."""

from pathlib import Path

import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb

from tests.campaigns.moves import link


@pytest.mark.long(3)
def test_an_agent_moves_over_a_paced_link_and_after_a_turn_only_what_is_new_goes_back(tmp_path: Path) -> None:
    # Only Linux has these namespaces, and only its root may make them: a Mac, or a user's checkout, skips by name.
    if why := link.why_no_link():
        pytest.skip(f"no move over a paced link was measured, it needs Linux, root, ip, netem or a TUN device: {why}")
    for name in link.HOSTS:
        (tmp_path / name).mkdir(mode=0o700)
    with link.linked() as spaces, link.stores(tmp_path, spaces) as running:
        moved = link.move(tmp_path, running, "ada", 7_000_000)
        with link.client_of(tmp_path / "laptop") as here:
            assert here.get_agent("ada").ownership.state == pb.OWNER_STATE_OWNED
        # Slower than the link's 125 MB/s, so it went over it.
        assert moved.memory_bytes / 130e6 < moved.seconds < 60
        back, allowed_bytes = link.move_back(tmp_path, running, "ada")
        assert back.memory_bytes // 2 < back.received_bytes <= allowed_bytes
