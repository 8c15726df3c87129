"""`kvasir up --at-login`: the files that launchd and systemd take, and when they take them."""

import inspect
import plistlib
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvasir.cli.root import everywhere
from kvasir.cli.running import at_login as at_login_jobs
from kvasir.cli.running import up
from kvasir.cli.running.at_login import job_of, start_at_login
from kvasir.cli.running.home import Home
from kvasir.cli.running.starting import EngineKilledError

from tests.cli.running import Ended, in_process


@pytest.fixture
def at_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Ended, list[str]]]:
    """`kvasir up` with such words, and the commands of launchd or systemd that it gave: both are played, and fail once
    with the exit code in a file `fails`. launchd has a job that it ends for as many questions as a file `late` has
    lines, and takes no other of this name meanwhile.
    """
    programs, log = tmp_path / "bin", tmp_path / "log"
    programs.mkdir()
    for name in ("launchctl", "systemctl"):
        (programs / name).write_text(
            f'#!/bin/sh\necho {name} "$@" >> {log}\n'
            f"[ ! -e {tmp_path}/fails ] || {{ code=`cat {tmp_path}/fails`; echo no session >&2; rm {tmp_path}/fails;"
            " exit $code; }\n"
            f"case $1 in bootstrap) [ ! -s {tmp_path}/late ] || {{ echo Input/output error >&2; exit 5; }};;\n"
            f"print) [ -s {tmp_path}/late ] || exit 113; sed 1d {tmp_path}/late > {tmp_path}/later;\n"
            f"  mv {tmp_path}/later {tmp_path}/late;; esac\n"
        )
        (programs / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))

    def of(*words: str) -> tuple[Ended, list[str]]:
        log.write_text("")
        argv = ["--home", str(tmp_path / "h"), "up", *words]
        monkeypatch.setattr(sys, "argv", ["kvasir", *argv])
        return in_process(*argv), log.read_text().splitlines()

    return of


@pytest.mark.parametrize("version", ["0.2.0", "0.1.0"])
def test_a_job_outlives_the_upgrade_of_homebrew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    for each in ("0.1.0", "0.2.0"):
        (tmp_path / "Cellar" / "kvasir" / each / "libexec" / "bin").mkdir(parents=True)
        (tmp_path / "Cellar" / "kvasir" / each / "libexec" / "bin" / "python").touch()
    (tmp_path / "opt").mkdir()
    (tmp_path / "opt" / "kvasir").symlink_to("../Cellar/kvasir/0.2.0")
    program = f"{tmp_path}/Cellar/kvasir/{version}/libexec/bin/python"
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "executable", program)
    lasting = f"{tmp_path}/opt/kvasir/libexec/bin/python" if version == "0.2.0" else program
    assert f'ExecStart="{lasting}" "-Pm"' in job_of(Home(tmp_path), ()).content.decode()


def test_launchd_starts_it_now_and_at_each_login_with_the_flags_that_were_given(
    at_login: Callable[..., tuple[Ended, list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    ended, commands = at_login("--at-login", "--no-http", "--memory-gib", "1")
    assert ended.code == 0, ended.err
    [file] = (tmp_path / "Library" / "LaunchAgents").iterdir()
    job: dict[str, Any] = plistlib.loads(file.read_bytes())
    own = [sys.executable, "-Pm", "kvasir", "--home", str(tmp_path / "h"), "up", "--as-login-job"]
    assert job["ProgramArguments"] == [*own, "--no-http", "--memory-gib", "1"]
    assert job["EnvironmentVariables"]["PATH"].startswith(str(tmp_path))
    assert (job["RunAtLoad"], job["KeepAlive"]) == (True, {"SuccessfulExit": False})
    assert job["SoftResourceLimits"] == {"NumberOfFiles": 65_536}
    assert job["Label"] == file.stem
    assert [command.split()[1] for command in commands] == ["bootout", "print", "bootstrap"]
    ended, commands = at_login("--remove-at-login")
    assert (ended.code, [command.split()[1] for command in commands]) == (0, ["bootout", "print"])
    assert not file.exists()
    assert "nothing starts at login" in at_login("--remove-at-login")[0].out


def test_systemd_takes_the_unit_and_its_refusal_is_reported(
    at_login: Callable[..., tuple[Ended, list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    ended, commands = at_login("--at-login", "--no-http")
    assert ended.code == 0, ended.err
    [unit] = (tmp_path / ".config" / "systemd" / "user").iterdir()
    assert commands[-1] == f"systemctl --user enable --now {unit.stem}"
    if verify := shutil.which("systemd-analyze"):
        found = subprocess.run([verify, "--user", "verify", str(unit)], capture_output=True, text=True)
        assert str(unit.name) not in found.stderr, found.stderr
    (tmp_path / "fails").write_text("1")
    ended, _ = at_login("--remove-at-login")
    assert ended.code != 0
    assert "no session" in ended.err
    assert unit.exists()


def test_launchd_may_end_a_job_late_and_may_not_have_it(
    at_login: Callable[..., tuple[Ended, list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    for code in ("0", "36", "37"):  # with 0, too, it may end later
        (tmp_path / "fails").write_text(code)
        (tmp_path / "late").write_text("\n")
        ended, commands = at_login("--at-login", "--no-http")
        expected = ["bootout", "print", "print", "bootstrap"]
        assert (ended.code, [command.split()[1] for command in commands]) == (0, expected), ended.err
    for absent in ("3", "113"):
        (tmp_path / "fails").write_text(absent)
        ended, _ = at_login("--remove-at-login")
        assert (ended.code, [*(tmp_path / "Library" / "LaunchAgents").iterdir()]) == (0, []), ended.err
        at_login("--at-login", "--no-http")


def test_a_job_that_launchd_does_not_end_keeps_its_file(
    at_login: Callable[..., tuple[Ended, list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    at_login("--at-login", "--no-http")
    (tmp_path / "late").write_text(1000 * "\n")
    monkeypatch.setattr(at_login_jobs, "_STOP", 0)
    monkeypatch.setattr(at_login_jobs, "PATIENCE_S", 0.3)
    ended, _ = at_login("--remove-at-login")
    assert ended.code != 0
    assert "plist stays: `launchctl bootout" in ended.err
    assert len([*(tmp_path / "Library" / "LaunchAgents").iterdir()]) == 1


def test_without_systemd_it_is_refused(
    at_login: Callable[..., tuple[Ended, list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    ended, _ = at_login("--at-login", "--no-http")
    assert "is written and not begun: `systemctl" in ended.err


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_options_of_the_environment_hold_at_login_and_only_the_owner_reads_them(
    platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("KVASIR_ENGINE_MEMORY_GIB", '2 "$x" 1%')
    job = job_of(Home(tmp_path / "h"), ())
    if platform == "darwin":
        assert plistlib.loads(job.content)["EnvironmentVariables"]["KVASIR_ENGINE_MEMORY_GIB"] == '2 "$x" 1%'
    else:
        assert b'\nEnvironment="KVASIR_ENGINE_MEMORY_GIB=2 \\"$x\\" 1%%"\n' in job.content
    start_at_login(replace(job, begin=(), end=("true",)))
    assert stat.S_IMODE(job.file.stat().st_mode) == 0o600


def test_a_home_of_the_commands_name_is_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--home up up`: the first is a directory."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.chdir(tmp_path)
    switches = {"context", "as_json", "until_eof", "_version"}
    names = set(inspect.signature(everywhere).parameters) - switches
    assert {f"--{name.replace('_', '-')}" for name in names} == set(up.BEFORE_WITH_VALUE)
    for before in (("--home", "up"), ("--json", "--home=up"), ("--home", "up", "--token-file", "up")):
        argv = [*before, "up", "--at-login", "--no-http"]
        monkeypatch.setattr(sys, "argv", ["kvasir", *argv])
        in_process(*argv)
        [unit] = (tmp_path / ".config" / "systemd" / "user").iterdir()
        own = '"--home" "{}" "up" "--as-login-job" "--no-http"\n'
        assert own.format(tmp_path / "up") in unit.read_text()


@pytest.mark.parametrize(("words", "code"), [((), 1), (("--as-login-job",), 0)])
def test_the_system_does_not_restart_a_group_that_was_stopped_and_whose_engine_was_killed(
    words: tuple[str, ...], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """launchd and systemd start again each job that ends with another code than 0."""

    def ran(*_: object) -> bool:
        raise EngineKilledError

    monkeypatch.setattr(up, "_ran", ran)
    assert in_process("--home", tmp_path / "h", "up", "--no-http", *words).code == code


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_models_are_found_at_login_where_they_were_found_before(
    platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("HF_HOME", "/Volumes/models")
    monkeypatch.setenv("HF_TOKEN", "secret")
    content = job_of(Home(tmp_path / "h"), ()).content
    assert b"HF_HOME" in content
    assert b"/Volumes/models" in content
    assert b"secret" not in content


def test_a_long_log_that_launchd_opened_is_rotated_and_written_on(tmp_path: Path) -> None:
    log = tmp_path / "up.log"
    log.write_bytes(b"old\n" * (5 << 20))
    code = "from kvasir.cli.running.logs import rotate_own_log; from pathlib import Path; import sys; "
    code += f"rotate_own_log(Path({str(log)!r})); print('new', file=sys.stderr)"
    with log.open("ab") as opened:
        subprocess.run([sys.executable, "-c", code], stderr=opened, check=True)
    assert log.read_text() == "new\n"
    assert (tmp_path / "up.1.log").stat().st_size == 20 << 20


def test_words_of_the_shell_mean_themselves_and_each_home_has_a_job_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    strange = job_of(Home(tmp_path / "h"), ['--alias=a "b" 100% $HOME'])
    assert b'"--alias=a \\"b\\" 100%% $$HOME"' in strange.content
    files = {job_of(Home(root), ()).file for root in (tmp_path / "h", tmp_path / "g", tmp_path / ".kvasir")}
    assert len(files) == 3
