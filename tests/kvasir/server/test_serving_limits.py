"""What a service settles before it serves."""

import multiprocessing
import resource

from kvasir.server.serving import raise_file_limit, settle_limits


def test_a_server_may_open_as_many_files_as_the_system_lets_it() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[0]), before[1]))
    try:
        assert raise_file_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft >= 10_240 or soft == hard
        assert hard == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _core_limit_once_settled(answer: "multiprocessing.connection.Connection") -> None:
    settle_limits()
    answer.send(resource.getrlimit(resource.RLIMIT_CORE))


def test_a_service_leaves_no_core_dump() -> None:
    mine, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_core_limit_once_settled, args=(its,))
    process.start()
    assert mine.recv() == (0, 0)
    process.join()
